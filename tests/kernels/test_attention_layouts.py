"""Tests of splits and tiles of windows, of windows of prompts and ragged contexts, and of writing committed K/V.

Forms in torch are compared with dense attention in float64.
"""

import random
from unittest.mock import patch

import pytest
import torch
from acceptance_cases import DTYPES, FP32_TOL, dense_attention
from canonical_drafter import config_json
from dspark_kernels import (
    WINDOW_ROWS,
    CommitRows,
    VisibleKeys,
    attend_groups,
    cut_prompts,
    dispatch,
    fixed_split_for,
    is_crowded,
    kv_inject,
    num_splits,
    tile_contexts,
    widest_window,
)
from dspark_kernels.attention import prompts as prompts_module
from dspark_kernels.attention import window as module
from target_distribution import pairwise
from triton import next_power_of_2

from sglang_dspark.draft.formats import read_content
from sglang_dspark.draft.model import DraftModel


@pytest.mark.parametrize(
    ("kv_heads", "splits"),
    [
        (8, {1: 33, 2: 16, 3: 11, 4: 8, 6: 5, 8: 4, 11: 3, 16: 2, 17: 1, 64: 1, 512: 1}),
        (2, {1: 132, 4: 33, 8: 16, 16: 8, 32: 4, 66: 2, 67: 1}),
        (1, {1: 256, 2: 132, 33: 8}),
    ],
)
def test_splits_fill_the_processors(kv_heads, splits):
    """Two programs of long contexts for each of 132 multiprocessors, as nearly as whole splits allow."""
    assert {bs: num_splits(bs, kv_heads, 132) for bs in splits} == splits
    assert all(bs * kv_heads * num <= 2 * 132 for bs, num in splits.items() if num > 1)
    assert not is_crowded(256 // kv_heads, kv_heads, 132) and is_crowded(512 // kv_heads, kv_heads, 132)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("head_dim", [64, 80, 128, 256])
def test_no_tile_of_a_window_that_start_up_lets_through_is_too_large(head_dim, dtype):
    """Compiled for GPUs that are not here by `benchmarks/kernels/compile_for.py`, as wide as that."""
    widest = widest_window(head_dim, dtype)
    head_bytes = module._block_d(head_dim) * dtype.itemsize
    for width in (1, 8, widest - 1, widest):
        for group in (1, 4, 7, 16):
            share = module._heads_per_program(group, width, head_bytes)
            assert 1 <= share <= group
            assert next_power_of_2(width * share) * head_bytes <= module._MAX_TILE
    assert module._heads_per_program(4, 8, 64) == 4
    assert next_power_of_2(widest + 1) * head_bytes > module._MAX_TILE


def test_splits_suffice_for_the_longest_context():
    lengths = 1, 512 * 32, 512 * 32 + 1, 1 << 20
    assert [fixed_split_for(length) for length in lengths] == [512, 512, 1024, 32768]


def test_prompts_are_cut_into_windows(device, monkeypatch):
    """So many share a call as there are counters and memory for; all have a call, in order."""
    table = torch.zeros(9, 4, dtype=torch.int32, device=device)
    prompts = cut_prompts(table, torch.tensor([7, 3, 5], device=device), [100, 0, 9], [17, 0, 32])
    windows = prompts.windows
    assert windows.req_pool_indices.tolist() == [7, 7, 5, 5]
    assert windows.prefix_lens.tolist() == [100, 116, 9, 25]
    assert windows.indptr.tolist() == list(prompts.first_rows) == [0, 16, 17, 33, 49]
    assert (windows.width, prompts.key_lens) == (WINDOW_ROWS, [116, 117, 25, 41])
    with pytest.raises(ValueError, match="2 prefix_lens for 1 extend_lens"):
        cut_prompts(table, windows.req_pool_indices, [1, 2], [3])

    def calls(*, is_split=True, fixed_split=64):
        return list(prompts_module._calls(prompts, fixed_split, 4, 16, is_split=is_split))

    assert calls() == [(0, 4, 2)]
    monkeypatch.setattr(prompts_module, "_PARTS_BYTES", 2 * 17 * 4 * 16 * 4)
    assert calls() == [(0, 2, 2), (2, 4, 1)]
    assert calls(is_split=False) == [(0, 4, 2)]
    monkeypatch.setattr(prompts_module, "_PARTS_BYTES", 1)
    assert calls() == [(0, 1, 2), (1, 2, 2), (2, 3, 1), (3, 4, 1)]
    monkeypatch.setattr(prompts_module, "_PARTS_BYTES", 1 << 30)
    monkeypatch.setattr(prompts_module, "SPLIT_TILES", 12)
    assert calls() == [(0, 3, 2), (3, 4, 1)]


EPS = 1e-6


@pytest.mark.parametrize("index_dtype", [torch.int32, torch.int64])
def test_only_committed_rows_are_written(index_dtype, device):
    generator, slots = torch.Generator().manual_seed(0), torch.arange(3, 15, device=device)
    projected, norm = (torch.randn(*s, generator=generator).to(device) for s in ((12, 2 * 2 * 2 * 24), (2, 24)))
    given = projected, norm, EPS, torch.ones(12, device=device), slots, slots
    accepted = torch.tensor([2, 0, -1, 3])
    columns = torch.tensor([0, 1, 2, 3, 0, 1, 0, 0, 1, 0, 0, 99])
    requests = torch.tensor([0, 0, 0, 0, 1, 1, 2, 3, 3, 4, -1, 3])
    expected = torch.tensor([1, 1, 1, 0, 1, 0, 0, 1, 1, 0, 0, 0], dtype=torch.bool)
    rows = CommitRows(*(x.to(index_dtype).to(device) for x in (columns, requests, accepted)))
    assert torch.equal(rows.kept().cpu(), expected)
    for form in (kv_inject, kv_inject.reference):
        for rows_or_all, written in ((rows, expected), (None, torch.ones(12, dtype=torch.bool))):
            pools = tuple(torch.zeros(2, 16, 2, 24, device=device) for _ in range(2))
            form(*given, pools, rows_or_all)
            for pool in pools:
                changed = (pool[:, 1:] != 0).flatten(2).any(-1).any(0).cpu()
                assert set((1 + changed.nonzero().squeeze(1)).tolist()) == set(slots.cpu()[written].tolist())


def test_what_is_computed_is_narrowed_where_the_host_may_read(device):
    """On a CPU to the kept rows; with kernels not at all, for their number is known only on the device."""
    columns, requests = torch.tensor([0, 1, 0, 1], device=device), torch.tensor([0, 0, 1, 1], device=device)
    rows = CommitRows(columns, requests, torch.tensor([0, 1], device=device))
    assert rows.narrowed() == (slice(None), rows)
    on_host = CommitRows(*(part.cpu() for part in vars(rows).values()))
    with patch.object(dispatch, "_anywhere", []):
        kept, rest = on_host.narrowed()
    assert kept.tolist() == [0, 2, 3] and rest is None


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_stored_is_what_the_draft_model_computes(dtype, device):
    config = read_content(config_json(num_hidden_layers=3, layer_types=...), origin="").config
    torch.manual_seed(0)
    model = DraftModel(config, own_embedding=False, own_lm_head=False).to(device, dtype)
    for layer in model.decoder_layers:
        torch.nn.init.normal_(layer.self_attn.k_norm.weight)
    model.freeze()
    num_rows, num_slots = 11, 30
    h_ctx = torch.randn(num_rows, config.hidden_size, device=device, dtype=dtype)
    positions = torch.randint(0, 3000, (num_rows,), device=device)
    slots = 1 + torch.randperm(num_slots - 1, device=device)[:num_rows]
    k, v = model.context_kv(h_ctx, positions)
    inputs = model.context_projection(h_ctx), model.context_k_norm, config.rms_norm_eps, model.rotary.inv_freq
    shape = (config.num_hidden_layers, num_slots, config.num_key_value_heads, config.head_dim)
    k_pool, v_pool = (torch.zeros(shape, dtype=dtype, device=device) for _ in range(2))
    kv_inject.reference(*inputs, positions, slots, (k_pool, v_pool))
    assert torch.equal(k_pool[:, slots], k) and torch.equal(v_pool[:, slots], v)


RAGGED = {
    "one token": ([1], [1]),
    "decode": ([40], [1]),
    "no prefix": ([8], [8]),
    "uniform": ([50, 50, 50], [3, 3, 3]),
    "one padded group": ([50, 45, 40], [1, 6, 3]),
    "several groups": ([3, 200, 64, 4, 190, 60], [2, 1, 6, 4, 3, 1]),
    "prompts": ([200, 64, 8], [200, 33, 8]),
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
    visible, read = VisibleKeys(sliding_window=window), pools
    if translated:
        firsts = [0 if window is None else max(0, keys - queries - window + 1) for _, keys, queries in spans]
        parts = [table[row, first:keys] for (row, keys, _), first in zip(spans, firsts, strict=True)]
        seen = torch.cat(parts).unique().long()
        translation, own = torch.zeros(300, dtype=torch.int64), 1 + torch.randperm(len(seen), generator=generator)
        translation[seen] = own
        visible, read = visible._replace(translation=translation), [torch.full((301, 2, 32), torch.nan) for _ in pools]
        for pool, of_its_own in zip(pools, read, strict=True):
            of_its_own[own] = pool[seen]
    layout = tile_contexts(table, rows, key_lens, query_lens, visible, heads_per_kv=3, dtype=torch.float32)
    out = attend_groups(q, *read, layout, 32**-0.5, sinks=sinks)
    start = 0
    for row, num_keys, num_queries in spans:
        k, v = (pool[table[row, :num_keys].long()] for pool in pools)
        positions = num_keys - num_queries + torch.arange(num_queries)[:, None]
        ages = positions - torch.arange(num_keys)
        mask = (ages >= 0) & (ages < (num_keys if window is None else window))
        part = slice(start, start + num_queries)
        torch.testing.assert_close(out[part].double(), dense_attention(q[part], k, v, mask, sinks), **FP32_TOL)
        start += num_queries


@pytest.mark.parametrize(
    ("dtype", "heads", "head_dim", "window", "with_sinks"),
    [
        (torch.float32, (9, 3), 64, None, False),
        (torch.bfloat16, (9, 3), 64, None, False),
        (torch.float32, (2, 2), 80, 33, False),
        (torch.bfloat16, (8, 1), 128, 70, True),
        (torch.float32, (14, 2), 256, None, True),
        (torch.float16, (4, 1), 96, None, False),
    ],
)
def test_rows_have_the_same_bits_in_every_batch(dtype, heads, head_dim, window, with_sinks):
    """Alone, in a verification of any length and place, in a prompt or a part of one, next to any other requests."""
    chosen, lens = random.Random(0), [2100 if heads == (9, 3) else 700, 90, 33, 512, 6, *[70] * 12]
    generator = torch.Generator().manual_seed(0)
    num_heads, kv_heads = heads
    pools = [torch.randn(1 + sum(lens), kv_heads, head_dim, generator=generator).to(dtype) for _ in range(2)]
    slots = (1 + torch.randperm(sum(lens), generator=generator)).split(lens)
    table = torch.zeros(len(lens), max(lens), dtype=torch.int32)
    for row, own in enumerate(slots):
        table[row, : len(own)] = own
    queries = [torch.randn(length, num_heads, head_dim, generator=generator).to(dtype) for length in lens]
    sinks = torch.linspace(-1, 2, num_heads) if with_sinks else None

    def attended(parts):
        rows, _, lasts = zip(*parts, strict=True)
        num_queries = [last - first for _, first, last in parts]
        visible, per_kv = VisibleKeys(sliding_window=window), num_heads // kv_heads
        layout = tile_contexts(table, rows, lasts, num_queries, visible, heads_per_kv=per_kv, dtype=dtype)
        q = torch.cat([queries[row][first:last] for row, first, last in parts])
        return attend_groups(q, *pools, layout, head_dim**-0.5, sinks=sinks).split(num_queries)

    whole = [attended([(row, 0, length)])[0] for row, length in enumerate(lens)]
    for border in range(64, lens[0], 64):  # of tiles
        [out] = attended([(0, border - 2, border + 4)])
        assert torch.equal(out, whole[0][border - 2 : border + 4])
    for _ in range(60):
        parts = []
        for row in chosen.sample(range(len(lens)), chosen.choice([1, 2, 5, len(lens)])):
            num = min(lens[row], chosen.choice([1, 1, 2, 3, 6, 17, 40]))
            first = chosen.randint(0, lens[row] - num)
            parts.append((row, first, first + num))
        for (row, first, last), out in zip(parts, attended(parts), strict=True):
            assert torch.equal(out, whole[row][first:last]), (row, first, last, len(parts))
