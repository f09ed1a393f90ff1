"""Tests of attention of few query rows per request, and of writing committed K/V.

Kernels, forms in torch and forms of a CPU are compared with dense attention in float64.
"""

import random
from dataclasses import replace
from unittest.mock import patch

import pytest
import torch
from acceptance_cases import DTYPES, FP32_TOL, assert_equal_but_for_rounding, dense_attention
from canonical_drafter import config_json
from dspark_kernels import (
    WINDOW_ROWS,
    CommitRows,
    PagedWindows,
    VisibleKeys,
    attend_groups,
    attend_prompts,
    cut_prompts,
    dispatch,
    fixed_split_for,
    is_crowded,
    kv_inject,
    num_splits,
    tile_contexts,
    widest_window,
    window_attention,
)
from dspark_kernels.attention import prompts as prompts_module
from dspark_kernels.attention import window as module
from target_distribution import pairwise
from triton import next_power_of_2
from triton.runtime.interpreter import interpreter_builder

from sglang_dspark.draft.formats import read_content
from sglang_dspark.draft.model import DraftModel

WINDOWS = {
    "blocks-gqa3": ((5, 0, 131, 64), (7, 7, 7, 7), (6, 2, 32)),
    "one-token-mha": ((1,), (1,), (3, 3, 16)),
    "ragged-smollm2": ((17, 3, 90), (4, 1, 2), (9, 3, 64)),
    "empty-request-mqa-odd-head": ((9, 170, 0), (5, 0, 3), (4, 1, 24)),
}


def window_case(prefix_lens, query_lens, shape, device, dtype=torch.float32, padding=3):
    generator = torch.Generator().manual_seed(sum(prefix_lens))
    heads, kv_heads, head_dim = shape
    bs, slots, num_rows = len(prefix_lens), 1 + sum(prefix_lens), sum(query_lens) + padding

    def rand(*shape):
        return torch.randn(*shape, generator=generator).to(device, dtype)

    # As a fused projection leaves them.
    q, k, v = rand(num_rows, heads + 2 * kv_heads, head_dim).split([heads, kv_heads, kv_heads], dim=1)
    pools = rand(slots, kv_heads, head_dim), rand(slots, kv_heads, head_dim)
    table = torch.randint(1, max(2, slots), (bs + 3, max(prefix_lens) + 5), generator=generator, dtype=torch.int32)
    rows = torch.randperm(bs + 3, generator=generator)[:bs]
    indptr = torch.tensor([0, *query_lens]).cumsum(0)
    lens = torch.tensor(prefix_lens, device=device)
    return q, (k, v), pools, PagedWindows(table.to(device), rows.to(device), lens, indptr.to(device), max(query_lens))


SIGHTS = {
    "everything": (None, False),
    "window of one": (1, False),
    "window within the rows": (3, False),
    "window into the context": (12, False),
    "window beyond the context": (500, False),
    "window of one before the anchor": (1, True),
    "window before the anchor": (70, True),
}


def sees(row, key, prefix, sliding_window, from_anchor, causal):
    """Return whether a row of the window sees a position, by the two rules of windows."""
    if causal and key > prefix + row:
        return False
    if sliding_window is None:
        return True
    if from_anchor:
        return key >= prefix - sliding_window
    return key >= prefix + row - sliding_window + 1


def sighted(case, name):
    sliding_window, from_anchor = SIGHTS[name]
    return *case[:3], replace(case[3], sliding_window=sliding_window, from_anchor=from_anchor)


@pytest.mark.parametrize(("window", "sight", "causal"), pairwise(list(WINDOWS), list(SIGHTS), [False, True]))
def test_reference_shows_what_the_rules_of_windows_say(window, sight, causal):
    prefix_lens, query_lens, shape = WINDOWS[window]
    q, (k, v), (k_pool, v_pool), windows = case = sighted(window_case(prefix_lens, query_lens, shape, "cpu"), sight)
    sinks = torch.linspace(-2, 3, shape[0])
    out = window_attention.reference(*case, causal=causal, scale=shape[2] ** -0.5, sinks=sinks)
    for index, (prefix, length) in enumerate(zip(prefix_lens, query_lens, strict=True)):
        start, slots = int(windows.indptr[index]), windows.req_to_token[windows.req_pool_indices[index], :prefix].long()
        part = slice(start, start + length)
        keys, values = torch.cat([k_pool[slots], k[part]]), torch.cat([v_pool[slots], v[part]])
        seen = [
            [sees(row, key, prefix, *SIGHTS[sight], causal) for key in range(prefix + length)] for row in range(length)
        ]
        mask = torch.tensor(seen, dtype=torch.bool).view(length, prefix + length)
        torch.testing.assert_close(out[part].double(), dense_attention(q[part], keys, values, mask, sinks), **FP32_TOL)


# The interpreter's tl.dot multiplies the bit patterns of bfloat16.
TOLERANCES = {
    torch.float32: FP32_TOL,
    torch.bfloat16 if torch.cuda.is_available() else torch.float16: {"atol": 2e-2, "rtol": 2e-2},
}
AXES = [False, True], [1, 2, 8], [False, True], [1, 4], [False, True]


@pytest.mark.parametrize(
    ("window", "sight", "causal", "splits", "with_sinks", "tiles", "crowded", "dtype"),
    pairwise(list(WINDOWS), list(SIGHTS), *AXES, list(TOLERANCES)),
)
def test_kernel_equals_reference(window, sight, causal, splits, with_sinks, tiles, crowded, dtype, device, monkeypatch):
    """With programs of either size, for every tile of keys and for the usual number of them."""
    monkeypatch.setattr(module, "_TILES_PER_SPLIT", tiles)
    monkeypatch.setattr(module, "is_crowded", lambda *batch: crowded)
    prefix_lens, query_lens, shape = WINDOWS[window]
    q, kv, pools, windows = case = sighted(window_case(prefix_lens, query_lens, shape, device, dtype), sight)
    sinks = torch.linspace(-2, 3, shape[0], device=device) if with_sinks else None
    how = {"causal": causal, "scale": shape[2] ** -0.5, "sinks": sinks}
    exact = q.float(), *(tuple(x.float() for x in pair) for pair in (kv, pools)), windows
    found = window_attention(*case, splits=splits, **how)
    torch.testing.assert_close(found.float(), window_attention.reference(*exact, **how), **TOLERANCES[dtype])


@pytest.fixture
def a_tile_per_split(monkeypatch):
    """Or contexts would have to be long."""
    monkeypatch.setattr(module, "_TILES_PER_SPLIT", 1)


def in_a_pool_of_its_own(case, device):
    """Return the case with the rows that are seen in smaller pools, scattered; all others are NaN, row 0 among them."""
    q, kv, pools, windows = case
    spans = zip(
        windows.req_pool_indices.tolist(), windows.prefix_lens.tolist(), windows.indptr.diff().tolist(), strict=True
    )
    stored = [
        (row, windows.first_seen(prefix), prefix + (length if kv is None else 0)) for row, prefix, length in spans
    ]
    slots = torch.cat([windows.req_to_token[row, first:last] for row, first, last in stored]).unique().long()
    own = torch.randperm(len(slots) + 8).to(device)[: len(slots)] + 1
    translation = torch.zeros(len(pools[0]) + 1, dtype=torch.int64, device=device)
    translation[slots] = own
    moved = tuple(torch.full((len(slots) + 9, *pool.shape[1:]), torch.nan).to(pool) for pool in pools)
    for pool, of_its_own in zip(pools, moved, strict=True):
        of_its_own.view(torch.uint8)[own] = pool.view(torch.uint8)[slots]
    return q, kv, moved, replace(windows, translation=translation)


@pytest.mark.usefixtures("a_tile_per_split")
@pytest.mark.parametrize(
    ("window", "sight", "splits", "is_stored", "form"),
    pairwise(list(WINDOWS), list(SIGHTS), [1, 2, 8], [False, True], [window_attention, window_attention.reference]),
)
def test_pools_that_number_their_rows_themselves(window, sight, splits, is_stored, form, device):
    """Keys that no row sees need no place in the pool."""
    prefix_lens, query_lens, shape = WINDOWS[window]
    q, kv, pools, windows = window_case(prefix_lens, query_lens, shape, device)
    table = torch.nn.functional.pad(windows.req_to_token, (0, windows.width), value=len(pools[0]) - 1)
    case = sighted((q, None if is_stored else kv, pools, replace(windows, req_to_token=table)), sight)
    how = {"causal": True, "scale": shape[2] ** -0.5, "splits": splits}
    expected = window_attention.reference(*case, **how)
    torch.testing.assert_close(form(*in_a_pool_of_its_own(case, device), **how), expected, **FP32_TOL)


@pytest.mark.usefixtures("a_tile_per_split")
@pytest.mark.parametrize("splits", [1, 4])
def test_sinks_count_once_whatever_the_context_is_split_into(splits, device):
    """Every head has its own, in 16 bits here."""
    case = window_case((150, 0), (3, 2), (10, 2, 24), device)
    sinks = torch.linspace(0, 8, 10, device=device).to(torch.float16)
    how = {"causal": True, "scale": 0.2, "sinks": sinks}
    found = window_attention(*case, splits=splits, **how)
    torch.testing.assert_close(found, window_attention.reference(*case, **how), **FP32_TOL)
    without = window_attention(*case, splits=splits, causal=True, scale=0.2)
    assert (found - without)[:5].abs().amax(dim=(0, 2)).min() > 1e-3


@pytest.mark.parametrize("splits", [3, 32])
def test_requests_use_splits_by_their_own_contexts(splits, device, monkeypatch):
    """Next to long contexts a short one gets the rows of a launch without splits and of equal programs, to the bit."""
    monkeypatch.setattr(module, "is_crowded", lambda *batch: False)
    prefix_lens, query_lens = (700, 5, 256, 0, 2049, 257), (3, 2, 1, 4, 1, 0)
    case = window_case(prefix_lens, query_lens, (4, 2, 16), device)
    how = {"causal": True, "scale": 0.25}
    out, whole = (window_attention(*case, splits=num, **how) for num in (splits, 1))
    torch.testing.assert_close(out, window_attention.reference(*case, **how), **FP32_TOL)
    rows = torch.arange(3, 10, device=device)  # of contexts of at most five tiles
    assert torch.equal(out[rows], whole[rows])


@pytest.mark.usefixtures("a_tile_per_split")
@pytest.mark.parametrize("splits", [33, 100])
def test_more_splits_than_are_combined_at_a_time(splits, device):
    """A rank with one K/V head needs hundreds of them for one request."""
    case = window_case((64 * 70 + 3, 64 * 33, 64 * 20), (2, 1, 1), (2, 1, 16), device)
    how = {"causal": True, "scale": 0.5}
    found = window_attention(*case, splits=splits, **how)
    torch.testing.assert_close(found, window_attention.reference(*case, **how), **FP32_TOL)


@pytest.mark.parametrize(
    ("tiles", "splits", "used"),
    [(5, 8, 1), (6, 8, 3), (8, 8, 4), (9, 8, 3), (40, 8, 8), (40, 33, 20), (40, 3, 3)],
)
def test_contexts_use_splits_that_have_work(tiles, splits, used, device, monkeypatch):
    """A split has two tiles, unless there are fewer than six in all; what other splits would write stays as it is."""
    made = []
    monkeypatch.setattr(module, "_parts", spying(module._parts, made))
    case = window_case((64 * tiles, 64 * 4), (2, 3), (2, 1, 16), device, padding=0)
    window_attention(*case, causal=True, scale=0.25, splits=splits)
    [(_, lse)] = made
    written = lse.isfinite().all(2).sum(0)
    assert written.tolist() == [used if used > 1 else 0] * 2 + [0] * 3


def spying(parts, made):
    """Remembers what was made, filled with NaN."""

    def spy(*args):
        made.append(tuple(part.fill_(torch.nan) for part in parts(*args)))
        return made[-1]

    return spy


@pytest.mark.parametrize("splits", [3, 11, 16])
def test_the_last_program_combines_whichever_it_is(splits, device, monkeypatch):
    """The result is the same to the bit, and counters are zeros again: a captured launch is replayed."""
    for name, value in {
        "_TILES_PER_SPLIT": 1,
        "_FAN": 4,
        "_tiles_of_keys": lambda *args, **how: {"BLOCK_N": 16},
    }.items():
        monkeypatch.setattr(module, name, value)
    case = window_case((16 * 16, 9, 16 * 4), (2, 2, 3), (3, 1, 16), device, padding=2)
    how = {"causal": True, "scale": 0.25}
    expected = window_attention(*case, splits=splits, **how)
    torch.testing.assert_close(expected, window_attention.reference(*case, **how), **FP32_TOL)
    in_order = interpreter_builder.set_grid_idx
    for arrival in (list(range(splits))[::-1], torch.randperm(splits).tolist()):
        monkeypatch.setattr(interpreter_builder, "set_grid_idx", lambda x, y, z, to=arrival: in_order(x, y, to[z]))
        assert torch.equal(window_attention(*case, splits=splits, **how), expected)
        assert not module._arrivals(expected.device).any()


@pytest.mark.usefixtures("a_tile_per_split")
@pytest.mark.parametrize(
    ("heads", "kv_heads", "max_tile"), [(9, 3, 16 * 64), (14, 2, 16 * 64), (14, 2, 32 * 64), (5, 1, 64 * 64)]
)
def test_groups_of_heads_are_shared_out(heads, kv_heads, max_tile, device, monkeypatch):
    """Shares of one head up to all of a group, and a last share that is not full."""
    monkeypatch.setattr(module, "_MAX_TILE", max_tile)
    case = window_case((33, 0, 140), (4, 7, 1), (heads, kv_heads, 64), device)
    for causal, splits in ((True, 1), (False, 2)):
        out = window_attention(*case, causal=causal, scale=0.125, splits=splits)
        expected = window_attention.reference(*case, causal=causal, scale=0.125)
        torch.testing.assert_close(out[:12], expected[:12], **FP32_TOL)


@pytest.mark.usefixtures("a_tile_per_split")
@pytest.mark.parametrize(
    ("window", "splits", "dtype"),
    pairwise(list(WINDOWS), [1, 2], [torch.float16, torch.float8_e4m3fn, torch.float8_e5m2]),
)
def test_a_window_that_is_stored_is_read_from_the_pool(window, splits, dtype, device):
    """K/V is stored in the pool's dtype, after the contexts, as later steps will find it."""
    prefix_lens, query_lens, shape = WINDOWS[window]
    q, _, _, windows = window_case(prefix_lens, query_lens, shape, device)
    table = torch.nn.functional.pad(windows.req_to_token, (0, windows.width))
    windows = replace(windows, req_to_token=table)
    pool = tuple(torch.randn(200, *shape[1:], device=device).to(dtype) for _ in range(2))
    placed = []
    for row, prefix, length in zip(windows.req_pool_indices.tolist(), prefix_lens, query_lens, strict=True):
        table[row] = torch.randint(1, 200, table[row].shape).to(table)
        placed += table[row, prefix : prefix + length].tolist()
    how = {"causal": True, "scale": shape[2] ** -0.5}
    exact = tuple(part.float() for part in pool)
    rows = (torch.nn.functional.pad(part[placed], (0, 0, 0, 0, 0, len(q) - len(placed))) for part in exact)
    expected = window_attention.reference(q, tuple(rows), exact, windows, **how)
    for found in (
        window_attention(q, None, pool, windows, splits=splits, **how),
        window_attention.reference(q, None, pool, windows, **how),
    ):
        torch.testing.assert_close(found, expected, **FP32_TOL)


@pytest.mark.usefixtures("a_tile_per_split")
@pytest.mark.parametrize(("padding", "splits"), [(1, 4), (9, 1), (40, 4)])
def test_rows_of_no_request_are_zero(padding, splits, device):
    """Later layers compute with these rows, and quantise by the largest value that they see."""
    case = window_case((33, 0, 140), (4, 0, 1), (6, 2, 24), device, padding=padding)
    out = window_attention(*case, causal=True, scale=0.125, splits=splits)
    assert out[:5].isfinite().all() and out[:5].any()
    assert not out[5:].any()


def test_as_many_splits_as_fill_the_gpu_by_default(device, monkeypatch):
    case, used = window_case((200,), (3,), (4, 2, 16), device, padding=0), []
    monkeypatch.setattr(module, "num_processors", lambda device: 8)
    monkeypatch.setattr(module, "num_splits", lambda *given: used.append(given) or num_splits(*given))
    how = {"causal": True, "scale": 0.25}
    torch.testing.assert_close(window_attention(*case, **how), window_attention.reference(*case, **how), **FP32_TOL)
    assert used == [(1, 2, 8)] and num_splits(*used[0]) == 8


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


def test_programs_of_many_requests_are_small():
    assert not is_crowded(32, 8, 132)
    assert is_crowded(64, 8, 132)


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


class Texts:
    """Requests whose rows all have queries, keys and values, from which windows are put together."""

    def __init__(self, lens, shape, device, dtype):
        heads, kv_heads, head_dim = shape
        generator = torch.Generator().manual_seed(sum(lens))
        slots = 1 + torch.randperm(len(lens) * max(lens), generator=generator)
        self.lens, self.device, self.table = lens, device, slots.int().view(len(lens), -1).to(device)
        self.q = [torch.randn(length, heads, head_dim, generator=generator).to(device, dtype) for length in lens]
        size = len(slots) + 1, kv_heads, head_dim
        self.pools = tuple(torch.randn(size, generator=generator).to(device, dtype) for _ in range(2))

    def prompts(self):
        indices = torch.arange(len(self.lens), device=self.device)
        return torch.cat(self.q), cut_prompts(self.table, indices, [0] * len(self.lens), self.lens)

    def case(self, spans, padding=0):
        """Return arguments of ``window_attention`` for windows (request, first row, rows)."""
        requests, firsts, lengths = torch.tensor(spans).T.contiguous().to(self.device)
        indptr = torch.nn.functional.pad(lengths.cumsum(0), (1, 0))
        q = torch.cat([self.q[request][first : first + length] for request, first, length in spans])
        q = torch.nn.functional.pad(q, (0, 0, 0, 0, 0, padding))
        windows = PagedWindows(self.table, requests, firsts, indptr, max(length for *_, length in spans))
        return q, None, self.pools, windows

    def span(self, length, border, rng):
        """Return a window of so many rows, in two of three cases one that meets a multiple of ``border``."""
        request = rng.choice([request for request, rows in enumerate(self.lens) if rows >= length])
        most = self.lens[request] - length
        at = border * rng.randrange(1, 1 + max(1, most // border)) - rng.randrange(length + 1)
        return request, min(at, most) if rng.random() < 2 / 3 else rng.randrange(most + 1), length


@pytest.fixture
def products_by_rows(monkeypatch):
    """On a CPU a matrix product may round a row by its place, which the instructions of a GPU do not; and bfloat16."""

    def numbers(x):
        return (x.data.astype("uint32") << 16).view("float32") if x.dtype.scalar.is_bf16() else x.data.astype("float32")

    def dot(a, b, total, *_):
        summed = sum(column[:, None] * row for column, row in zip(numbers(a).T, numbers(b), strict=True))
        return type(total)(summed + total.data, total.dtype.scalar)

    monkeypatch.setattr(interpreter_builder, "create_dot", dot)


FIXED = {  # keys of a tile, tiles of a split, parts that are combined at a time
    "usual tiles": (None, 64, 16),
    "small tiles": (16, 32, 4),
}


@pytest.mark.usefixtures("products_by_rows")
@pytest.mark.parametrize(
    ("sliding_window", "with_sinks", "shape", "dtype", "tiles", "translated"),
    pairwise(
        *([None, 6, 64], [False, True], [(6, 2, 16), (4, 1, 24), (2, 2, 32)], [torch.float32, torch.bfloat16]),
        *(list(FIXED), [False, True]),
    ),
)
def test_windows_have_the_same_bits_in_every_batch(
    sliding_window, with_sinks, shape, dtype, tiles, translated, device, monkeypatch
):
    """As rows of whole prompts in windows of every length, with other requests, in other orders, with more splits.

    Contexts cross several borders of splits. Prompts take several calls. Keys that no row sees are NaN.
    """
    keys, fixed_split, fan = FIXED[tiles]
    if keys is not None:
        usual = module._tiles_of_keys
        monkeypatch.setattr(module, "_tiles_of_keys", lambda *args, **how: usual(*args, **how) | {"BLOCK_N": keys})
    monkeypatch.setattr(module, "_FAN", fan)
    heads, _, head_dim = shape
    monkeypatch.setattr(prompts_module, "_PARTS_BYTES", 8 * WINDOW_ROWS * heads * head_dim * 4)
    texts, rng = Texts((132, 21, 40), shape, device, dtype), random.Random(repr((sliding_window, shape, tiles)))
    sinks = torch.linspace(-2, 3, heads, device=device) if with_sinks else None
    how = {"scale": head_dim**-0.5, "sinks": sinks}
    sight = {"sliding_window": sliding_window, "fixed_split": fixed_split}
    q, prompts = texts.prompts()
    whole = attend_prompts(q, texts.pools, prompts, **sight, **how)
    exact = q.float(), None, tuple(pool.float() for pool in texts.pools)
    windows = replace(prompts.windows, **sight)
    expected = window_attention.reference(*exact, windows, causal=True, **how)
    tolerance = FP32_TOL if dtype == torch.float32 else {"atol": 2e-2, "rtol": 2e-2}
    torch.testing.assert_close(whole.float(), expected, **tolerance)
    whole = whole.split(texts.lens)

    lengths = rng.sample(range(1, WINDOW_ROWS + 1), WINDOW_ROWS)
    while lengths:
        spans = [texts.span(lengths.pop(), keys or 64, rng) for _ in range(min(len(lengths), rng.randint(1, 5)))]
        q, kv, pools, windows = texts.case(spans, padding=rng.randrange(3))
        case = q, kv, pools, replace(windows, **sight)
        splits = -(-max(first + length for _, first, length in spans) // fixed_split) + rng.randrange(3)
        case = in_a_pool_of_its_own(case, device) if translated else case
        found = window_attention(*case, causal=True, splits=splits, **how)
        known = [whole[request][first : first + length] for request, first, length in spans]
        assert torch.equal(found[: windows.indptr[-1]], torch.cat(known)), spans


@pytest.mark.parametrize("group", [1, 3, 8])
def test_fixed_tiles_follow_heads_and_dtypes_only(group, device):
    """A GPU rounds by the forms of its instructions, which the interpreter does not have."""
    *_, windows = window_case((5,), (1,), (group, 1, 64), device)
    made = [
        (blocks, module._tiles_of_keys(blocks["BLOCK_M"], 64, 128, crowded=crowded, is_fixed=True))
        for width, crowded in ((1, False), (1, True), (7, True), (16, False))
        for blocks in [module._blocks_of_rows(replace(windows, width=width, fixed_split=64), group, 128)]
    ]
    assert made == made[:1] * len(made)


def test_too_few_splits_lose_no_keys(device):
    """Or counters would stay above zero for all that follows, and rows unwritten."""
    texts = Texts((300,), (2, 1, 16), device, torch.float32)
    *case, windows = texts.case([(0, 290, 10)])
    case, how = (*case, replace(windows, fixed_split=64)), {"causal": True, "scale": 0.25}
    for splits in (1, 3):
        out = window_attention(*case, splits=splits, **how)
        torch.testing.assert_close(out, window_attention.reference(*case, **how), **FP32_TOL)
        assert not module._arrivals(out.device).any()


@pytest.mark.parametrize(
    ("error", "of_windows", "options"),
    [
        ("see up to themselves", {}, {"causal": False}),
        ("see up to themselves", {"sliding_window": 3, "from_anchor": True}, {}),
        ("that the pool holds", {}, {"kv": True}),
        ("16 rows per request, not 17", {"width": 17}, {}),
        ("multiple of the 64 keys", {"fixed_split": 96}, {}),
        ("multiple of the 64 keys", {"fixed_split": 0}, {}),
        ("splits=None", {}, {"splits": None}),
        ("splits=257", {}, {"splits": 257}),
        ("splits=0", {}, {"splits": 0}),
        ("not 16386", {"prefix_lens": torch.zeros(8193)}, {}),
    ],
)
def test_fixed_splits_say_what_they_need(error, of_windows, options, device):
    q, kv, pools, windows = window_case((5, 9), (2, 3), (4, 2, 16), device)
    how = {"causal": True, "scale": 0.25, "splits": 1} | options
    case = q, kv if how.pop("kv", False) else None, pools, replace(windows, **{"fixed_split": 64} | of_windows)
    with pytest.raises(ValueError, match=error):
        window_attention(*case, **how)


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


def test_rows_of_no_prompt_are_zero(device):
    texts = Texts((5, 3), (2, 1, 16), device, torch.float32)
    q, prompts = texts.prompts()
    out = attend_prompts(torch.cat([q, q]), texts.pools, prompts, scale=0.25, fixed_split=512)
    assert out[:8].any(dim=2).all() and not out[8:].any()
    nothing = cut_prompts(texts.table, prompts.windows.req_pool_indices[:1], [4], [0])
    assert not attend_prompts(q, texts.pools, nothing, scale=0.25, fixed_split=512).any()


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
def test_both_forms_store_what_the_draft_model_computes(dtype, device):
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
    kv_inject(*inputs, positions, slots, (k_pool, v_pool))
    assert_equal_but_for_rounding(k_pool[:, slots], k)
    assert torch.equal(v_pool[:, slots], v)


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
