"""Tests of attention of few query rows: the kernel against its reference, and that against dense attention."""

import random
from dataclasses import replace

import pytest
import torch
from acceptance_cases import FP32_TOL, dense_attention
from dspark_kernels import (
    WINDOW_ROWS,
    PagedWindows,
    attend_prompts,
    cut_prompts,
    num_splits,
    window_attention,
)
from dspark_kernels.attention import prompts as prompts_module
from dspark_kernels.attention import window as module
from target_distribution import pairwise
from triton.runtime.interpreter import interpreter_builder

WINDOWS = {
    "blocks-gqa3": ((5, 0, 131, 64), (7, 7, 7, 7), (6, 2, 32)),
    "one-token-mha": ((1,), (1,), (3, 3, 16)),
    "ragged-smollm2": ((17, 3, 90), (4, 1, 2), (9, 3, 64)),
    "empty-request-mqa-odd-head": ((9, 170, 0), (5, 0, 3), (4, 1, 24)),
}


def window_case(prefix_lens, query_lens, shape, device, dtype=torch.float32, padding=3):
    """Arguments of ``window_attention``. The pool holds K and V of the windows, too."""
    generator = torch.Generator().manual_seed(sum(prefix_lens))
    heads, kv_heads, head_dim = shape
    bs, slots, num_rows = len(prefix_lens), 1 + sum(prefix_lens), sum(query_lens) + padding

    def rand(*shape):
        return torch.randn(*shape, generator=generator).to(device, dtype)

    # As a fused projection leaves them.
    q, k, v = rand(num_rows, heads + 2 * kv_heads, head_dim).split([heads, kv_heads, kv_heads], dim=1)
    pools = tuple(torch.cat([rand(slots, kv_heads, head_dim), x]) for x in (k, v))
    table = torch.randint(1, max(2, slots), (bs + 3, max(prefix_lens) + 9), generator=generator, dtype=torch.int32)
    rows = torch.randperm(bs + 3, generator=generator)[:bs]
    indptr = torch.tensor([0, *query_lens]).cumsum(0)
    for row, prefix, first, length in zip(rows.tolist(), prefix_lens, indptr.tolist(), query_lens, strict=False):
        table[row, prefix : prefix + length] = slots + torch.arange(first, first + length)
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


def sighted(case, name, *, is_stored=False):
    (q, kv, pools, windows), (sliding_window, from_anchor) = case, SIGHTS[name]
    windows = replace(windows, sliding_window=sliding_window, from_anchor=from_anchor)
    return q, None if is_stored else kv, pools, windows


@pytest.mark.parametrize(
    ("window", "sight", "causal", "is_stored"), pairwise(list(WINDOWS), list(SIGHTS), [False, True], [False, True])
)
def test_reference_shows_what_the_rules_of_windows_say(window, sight, causal, is_stored):
    prefix_lens, query_lens, shape = WINDOWS[window]
    q, (k, v), (k_pool, v_pool), windows = given = window_case(prefix_lens, query_lens, shape, "cpu")
    sinks, case = torch.linspace(-2, 3, shape[0]), sighted(given, sight, is_stored=is_stored)
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
    ("window", "sight", "splits", "is_stored", "form", "dtype"),
    pairwise(
        *(list(WINDOWS), list(SIGHTS), [1, 2, 8], [False, True], [window_attention, window_attention.reference]),
        [torch.float32, torch.float16, torch.float8_e4m3fn, torch.float8_e5m2],
    ),
)
def test_pools_that_number_their_rows_themselves(window, sight, splits, is_stored, form, dtype, device):
    """Keys that no row sees need no place in the pool, which has a dtype of its own."""
    prefix_lens, query_lens, shape = WINDOWS[window]
    q, kv, pools, windows = window_case(prefix_lens, query_lens, shape, device)
    case = sighted((q, kv, tuple(pool.to(dtype) for pool in pools), windows), sight, is_stored=is_stored)
    how = {"causal": True, "scale": shape[2] ** -0.5, "splits": splits}
    exact = *case[:2], tuple(pool.float() for pool in case[2]), case[3]
    expected = window_attention.reference(*exact, **how)
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


def test_rows_of_no_prompt_are_zero(device):
    texts = Texts((5, 3), (2, 1, 16), device, torch.float32)
    q, prompts = texts.prompts()
    out = attend_prompts(torch.cat([q, q]), texts.pools, prompts, scale=0.25, fixed_split=512)
    assert out[:8].any(dim=2).all() and not out[8:].any()
    nothing = cut_prompts(texts.table, prompts.windows.req_pool_indices[:1], [4], [0])
    assert not attend_prompts(q, texts.pools, nothing, scale=0.25, fixed_split=512).any()
