"""Attention of ragged rows on the CPU, against dense attention in float64."""

import pytest
import torch
from dense import FP32_TOL, dense_attention
from dspark_kernels import (
    VisibleKeys,
    attend_groups,
    group_contexts,
)

RAGGED = [
    pytest.param([1], [1], id="one-token"),
    pytest.param([40], [1], id="decode"),
    pytest.param([8], [8], id="no-prefix"),
    pytest.param([50, 50, 50], [3, 3, 3], id="uniform"),
    pytest.param([50, 45, 40], [1, 6, 3], id="one-padded-group"),
    pytest.param([3, 200, 64, 4, 190, 60], [2, 1, 6, 4, 3, 1], id="several-groups"),
]


@pytest.mark.parametrize("sinks", [None, torch.linspace(-2, 3, 6)], ids=["plain", "sinks"])
@pytest.mark.parametrize("window", [None, 1, 6, 64])
@pytest.mark.parametrize(("key_lens", "query_lens"), RAGGED)
def test_ragged_attention_is_causal_from_the_right(key_lens, query_lens, window, sinks):
    generator = torch.Generator().manual_seed(sum(key_lens))
    q = torch.randn(sum(query_lens), 6, 32, generator=generator)
    pools = [torch.randn(300, 2, 32, generator=generator) for _ in range(2)]
    table = torch.stack([1 + torch.randperm(299, generator=generator)[:210] for _ in range(9)]).int()
    rows = torch.randperm(9, generator=generator)[: len(key_lens)].tolist()
    visible = VisibleKeys(causal=True, sliding_window=window)
    groups = group_contexts(table, rows, key_lens, query_lens, visible, heads_per_kv=3, dtype=torch.float32)
    out = attend_groups(q, *pools, groups, 32**-0.5, sinks=sinks)
    start = 0
    for row, num_keys, num_queries in zip(rows, key_lens, query_lens, strict=True):
        k, v = (pool[table[row, :num_keys].long()] for pool in pools)
        positions = num_keys - num_queries + torch.arange(num_queries)[:, None]
        ages = positions - torch.arange(num_keys)
        mask = (ages >= 0) & (ages < (num_keys if window is None else window))
        part = slice(start, start + num_queries)
        torch.testing.assert_close(out[part].double(), dense_attention(q[part], k, v, mask, sinks), **FP32_TOL)
        start += num_queries


@pytest.mark.parametrize("window", [None, 1, 6, 64])
@pytest.mark.parametrize(("key_lens", "query_lens"), RAGGED)
def test_a_pool_that_numbers_its_rows_itself(key_lens, query_lens, window):
    """Keys that no query sees have lost their rows, and may be NaN."""
    generator = torch.Generator().manual_seed(sum(key_lens))
    q = torch.randn(sum(query_lens), 6, 32, generator=generator)
    pools = [torch.randn(400, 2, 32, generator=generator) for _ in range(2)]
    table = (1 + torch.randperm(399, generator=generator)).int()[None].expand(9, -1).clone()
    rows, visible = list(range(len(key_lens))), VisibleKeys(causal=True, sliding_window=window)
    how = {"heads_per_kv": 3, "dtype": torch.float32}
    expected = attend_groups(q, *pools, group_contexts(table, rows, key_lens, query_lens, visible, **how), 0.2)
    firsts = [0 if window is None else max(0, k - n - window + 1) for k, n in zip(key_lens, query_lens, strict=True)]
    seen = torch.cat([table[row, a:b] for row, a, b in zip(rows, firsts, key_lens, strict=True)]).unique().long()
    translation, own = torch.zeros(400, dtype=torch.int64), 1 + torch.randperm(len(seen), generator=generator)
    translation[seen] = own
    moved = [torch.full((len(seen) + 1, 2, 32), torch.nan) for _ in pools]
    for pool, of_its_own in zip(pools, moved, strict=True):
        of_its_own[own] = pool[seen]
    translated = visible._replace(translation=translation)
    groups = group_contexts(table, rows, key_lens, query_lens, translated, **how)
    torch.testing.assert_close(attend_groups(q, *moved, groups, 0.2), expected, **FP32_TOL)
