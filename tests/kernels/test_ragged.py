"""Attention of ragged rows on the CPU, against dense attention in float64."""

import pytest
import torch
from dense import FP32_TOL, dense_attention
from dspark_kernels import VisibleKeys, attend_groups, group_contexts
from pairwise import pairwise

RAGGED = {
    "one token": ([1], [1]),
    "decode": ([40], [1]),
    "no prefix": ([8], [8]),
    "uniform": ([50, 50, 50], [3, 3, 3]),
    "one padded group": ([50, 45, 40], [1, 6, 3]),
    "several groups": ([3, 200, 64, 4, 190, 60], [2, 1, 6, 4, 3, 1]),
}


@pytest.mark.parametrize(
    ("ragged", "window", "with_sinks", "translated"),
    pairwise(list(RAGGED), [None, 1, 6, 64], [False, True], [False, True]),
)
def test_ragged_attention_is_causal_from_the_right(ragged, window, with_sinks, translated):
    """In a pool that numbers its rows itself, keys that no query sees have lost their rows, and may be NaN."""
    (key_lens, query_lens), sinks = RAGGED[ragged], torch.linspace(-2, 3, 6) if with_sinks else None
    generator = torch.Generator().manual_seed(sum(key_lens))
    q = torch.randn(sum(query_lens), 6, 32, generator=generator)
    pools = [torch.randn(300, 2, 32, generator=generator) for _ in range(2)]
    table = torch.stack([1 + torch.randperm(299, generator=generator)[:210] for _ in range(9)]).int()
    rows = torch.randperm(9, generator=generator)[: len(key_lens)].tolist()
    spans = list(zip(rows, key_lens, query_lens, strict=True))
    visible, read = VisibleKeys(causal=True, sliding_window=window), pools
    if translated:
        firsts = [0 if window is None else max(0, keys - queries - window + 1) for _, keys, queries in spans]
        parts = [table[row, first:keys] for (row, keys, _), first in zip(spans, firsts, strict=True)]
        seen = torch.cat(parts).unique().long()
        translation, own = torch.zeros(300, dtype=torch.int64), 1 + torch.randperm(len(seen), generator=generator)
        translation[seen] = own
        visible, read = visible._replace(translation=translation), [torch.full((301, 2, 32), torch.nan) for _ in pools]
        for pool, of_its_own in zip(pools, read, strict=True):
            of_its_own[own] = pool[seen]
    groups = group_contexts(table, rows, key_lens, query_lens, visible, heads_per_kv=3, dtype=torch.float32)
    out = attend_groups(q, *read, groups, 32**-0.5, sinks=sinks)
    start = 0
    for row, num_keys, num_queries in spans:
        k, v = (pool[table[row, :num_keys].long()] for pool in pools)
        positions = num_keys - num_queries + torch.arange(num_queries)[:, None]
        ages = positions - torch.arange(num_keys)
        mask = (ages >= 0) & (ages < (num_keys if window is None else window))
        part = slice(start, start + num_queries)
        torch.testing.assert_close(out[part].double(), dense_attention(q[part], k, v, mask, sinks), **FP32_TOL)
        start += num_queries
