"""Tests of the cut of top-k, top-p and min-p, and of penalties, minimum lengths and biases, row by row."""

import random

import pytest
import torch
import triton
from dspark_kernels import Adjustment, AdjustmentTable, SamplingBatch, adjust
from dspark_kernels.acceptance.acceptance_filters import filter_kernel
from dspark_kernels.acceptance.acceptance_kernels import row_stats_kernel
from dspark_kernels.sampling import target_probs
from literal import literal_adjust

# Where a mass is this close to p, or a weight to min-p, the rounding of float32 decides.
NEAR = 3e-6
LOG_NORM_TOL = {"rtol": 1.5e-7, "atol": 5e-6}  # one unit in the last place, and float32 sums of 9001 weights
ROOM = 64  # so that small rows need the passes that narrow the interval

NOTHING = (-1, 1.0, 0.0)
COMBINATIONS = [
    (1.0, 2, 1.0, 0.0),
    (0.6, 20, 0.95, 0.0),  # Qwen3's
    (1.0, 7, 1.0, 0.0),
    (1.3, 100_000, 1.0, 0.0),
    (1.0, -1, 0.9, 0.0),
    (1.7, -1, 0.999, 0.0),
    (0.8, -1, 1e-7, 0.0),
    (1.0, -1, 1.0, 0.05),
    (1.0, -1, 1.0, 1.0),
    (0.7, -1, 1.0, 1e-6),
    (1.5, 300, 0.8, 0.02),
    (1.0, 5, 0.99, 0.3),
    (1.0, *NOTHING),
]


def rows_of(combinations, device="cpu"):
    columns = [list(column) for column in zip(*combinations, strict=True)]
    return SamplingBatch.from_lists(*columns, [None] * len(combinations), device)


def cut(logits, rows, tile=None, room=ROOM):
    """cut, last and log-normaliser of every row, which is a request of its own."""
    (bs, vocab_size), device = logits.shape, logits.device
    tile = tile or max(64, min(2048, triton.next_power_of_2(vocab_size)))
    num_tiles = triton.cdiv(vocab_size, tile)
    tile_max, tile_sum = (torch.full((bs, num_tiles), torch.nan, device=device) for _ in range(2))
    tile_token, last = (torch.full(shape, -7, dtype=torch.int32, device=device) for shape in ((bs, num_tiles), (bs,)))
    cuts, log_norms = (torch.full((bs,), torch.nan, device=device) for _ in range(2))
    given = logits, torch.arange(bs + 1, device=device), rows.draw_temperatures
    sizes = logits.stride(0), vocab_size, num_tiles
    row_stats_kernel[(bs, num_tiles)](
        *given, tile_max, tile_token, tile_sum, *sizes, bs, SAMPLED=True, TILE=tile, BLOCK_B=64
    )
    params = rows.filter_params
    filter_kernel[(bs, 1)](
        torch.zeros(bs, dtype=torch.int64, device=device),
        *given,
        params.top_ks,
        params.top_ps,
        params.min_ps,
        tile_max,
        tile_sum,
        torch.full((bs, room), torch.nan, device=device),
        cuts,
        last,
        log_norms,
        *sizes,
        0,
        TILE=tile,
        BLOCK_T=triton.next_power_of_2(num_tiles),
        ROOM=room,
    )
    top = logits.float().amax(-1)
    return cuts, last, log_norms + top / params.temperatures


def kept_tokens(logits, cuts, last):
    """[n, V] bool: what has mass under these cuts."""
    logits, tokens = logits.float(), torch.arange(logits.shape[1], device=logits.device)
    kept = (logits > cuts[:, None]) | ((logits == cuts[:, None]) & (tokens <= last[:, None]))
    return kept & (logits > -torch.inf)


def is_near(logits, combination):
    """Return whether rounding decides the cut of a row [V]."""
    temperature, _, top_p, min_p = combination
    probs = (logits.double() / temperature).softmax(-1).sort(descending=True).values
    before = probs.cumsum(-1) - probs
    near_p = top_p < 1 and bool(((before[1:] - top_p).abs() < NEAR).any())
    return near_p or (0 < min_p < 1 and bool(((probs / (probs[0] * min_p) - 1).abs() < NEAR).any()))


def check(logits, combinations, **options):
    """Compare rows with the reference; returns how many could be compared."""
    rows = rows_of(combinations, logits.device)
    cuts, last, log_norms = cut(logits, rows, **options)
    kept = kept_tokens(logits, cuts, last).cpu()
    expected = target_probs(logits, rows.filter_params).cpu() > 0
    compared = 0
    for row, combination in enumerate(combinations):
        weights = logits[row].double().cpu() / combination[0]
        norm = weights[kept[row]].logsumexp(-1)
        torch.testing.assert_close(log_norms[row].double().cpu(), norm, **LOG_NORM_TOL)
        if not is_near(logits[row].cpu(), combination):
            compared += 1
            # What underflows to no probability may be kept or not.
            seen = (weights - weights.max()).exp() > 1e-30
            assert torch.equal(kept[row] & seen, expected[row] & seen), (row, combination)
    return compared


KINDS = {
    # Ties by the dozen; both signs and zero, so that the search crosses the small exponents.
    "coarse": lambda noise: (noise * 4).round() / 2,
    "bfloat16": lambda noise: (noise * 3).bfloat16(),
    "fine": lambda noise: noise * 3 - 20,
    "flat": lambda noise: noise * 1e-3 + 40,
    "sharp": lambda noise: noise * 12,
}


@pytest.mark.parametrize(
    ("vocab_size", "kind"),
    [
        (23, "coarse"),
        (23, "sharp"),
        (111, "coarse"),
        (111, "bfloat16"),
        (111, "fine"),
        (111, "flat"),
        (4097, "bfloat16"),
        (4097, "sharp"),
    ],
)
def test_kept_sets_are_those_of_the_reference(device, vocab_size, kind):
    noise = torch.randn(len(COMBINATIONS), vocab_size, generator=torch.Generator().manual_seed(vocab_size))
    logits = KINDS[kind](noise).to(device)
    sizes = {"tile": 64} if vocab_size < 4097 else {"tile": 2048, "room": 1024}
    assert check(logits, COMBINATIONS, **sizes) >= len(COMBINATIONS) - 2


def test_the_default_form_keeps_the_same(device):
    """The tile and the room that ``accept`` takes, over several tiles."""
    noise = torch.randn(3, 9001, generator=torch.Generator().manual_seed(1))
    combinations = [(0.6, 20, 0.95, 0.0), (1.0, -1, 0.95, 0.0), (1.0, 2500, 1.0, 0.0)]
    assert check((noise * 2).bfloat16().to(device), combinations, room=2048) == 3


@pytest.mark.parametrize("room", [1, 32])
def test_ties_fill_what_the_filters_leave(device, room):
    """Rows of few values in many tokens, more than there is room for; every k, and p that end within a tie."""
    logits = torch.tensor([0.0, 1.0, 0.0, 2.0, 1.0, -0.0, 1.0, 0.0, 2.0, -1.0, 0.0] * 9).to(device)
    combinations = [(1.0, k, 1.0, 0.0) for k in (2, 17, 18, 19, 45, 46, 90, 99)]
    combinations += [(1.0, -1, p, 0.0) for p in (0.01, 0.4, 0.85, 0.995)]
    assert check(logits.expand(len(combinations), -1).contiguous(), combinations, tile=128, room=room) >= 11


@pytest.mark.parametrize(("top_p", "kept"), [(0.5, 33), (0.25, 17), (0.75, 49), (0.2499, 16), (1e-6, 1)])
@pytest.mark.parametrize("value", [0.0, -3.5])
def test_the_token_that_starts_at_exactly_p_stays(device, top_p, kept, value):
    logits = torch.full((1, 64), value, device=device)
    for room in (4, 64):
        cuts, last, log_norms = cut(logits, rows_of([(1.0, -1, top_p, 0.0)], device), room=room)
        assert kept_tokens(logits, cuts, last).sum() == kept
        assert kept_tokens(logits, cuts, last)[0, :kept].all()
        torch.testing.assert_close(log_norms.cpu(), value + torch.tensor([kept]).log(), **LOG_NORM_TOL)


@pytest.mark.parametrize("room", [4, 128])
def test_a_wide_tie_just_below_min_p_is_removed(device, room):
    """The search starts a little below min-p, so that rounding cannot cost a token."""
    logits = torch.full((2, 100), 0.5).log()
    logits[0] -= 5e-4
    logits[1] += 5e-4
    logits[:, 70] = 0.0
    combinations = [(1.0, 50, 1.0, 0.5)] * 2
    assert check(logits.to(device), combinations, tile=64, room=room) == 2
    cuts, last, _ = cut(logits.to(device), rows_of(combinations, device), tile=64, room=room)
    assert kept_tokens(logits.to(device), cuts, last).sum(-1).tolist() == [1, 50]


@pytest.mark.parametrize("room", [4, 128])
def test_forbidden_tokens_stay_forbidden(device, room):
    logits = torch.full((4, 300), -torch.inf)
    logits[:, 250:] = torch.randn(4, 50, generator=torch.Generator().manual_seed(2)) - 5
    combinations = [(1.0, 60, 1.0, 0.0), (1.0, 20, 1.0, 0.0), (1.0, -1, 0.9, 0.0), (1.0, 299, 1.0, 0.01)]
    assert check(logits.to(device), combinations, tile=64, room=room) >= 3


def test_rows_that_are_no_distribution_are_kept_whole(device):
    logits = torch.zeros(4, 200, device=device)
    logits[0] = torch.nan
    logits[1] = -torch.inf
    logits[2, 7] = torch.inf
    logits[3, 150:] = torch.nan
    cuts, last, _ = cut(logits, rows_of([(1.0, 5, 0.9, 0.1)] * 4, device))
    assert cuts.tolist() == [-torch.inf] * 4
    assert last.tolist() == [200] * 4


@pytest.mark.parametrize("tied", [(150, 10), (10, 150), (1, 3)])
def test_what_is_just_below_min_p_goes(device, tied):
    """More tokens than are collected at once, of two weights less than a thousandth below the floor."""
    logits = torch.full((1, 300), -20.0, device=device)
    logits[0, 7] = 1.0
    many, few = tied
    for start, count, share in ((20, many, 0.4999), (20 + many, few, 0.4996)):
        logits[0, start : start + count] = 1.0 + torch.log(torch.tensor(share))
    assert check(logits, [(1.0, -1, 1.0, 0.5)]) == 1
    cuts, last, _ = cut(logits, rows_of([(1.0, -1, 1.0, 0.5)], device))
    assert kept_tokens(logits, cuts, last).nonzero().tolist() == [[0, 7]]


RTOL = 2e-6  # float32 against float64; a logit passes four roundings


def some_adjustment(rng, vocab_size):
    kinds = [
        {"frequency": rng.uniform(-2, 2)},
        {"presence": rng.uniform(-2, 2)},
        {"repetition": rng.uniform(0.3, 2)},
        {"min_new_tokens": rng.randrange(1, 12), "stop_token_ids": rng.sample(range(vocab_size), 2)},
        {"logit_bias": {rng.randrange(vocab_size): rng.uniform(-50, 50) for _ in range(3)}},
    ]
    return Adjustment(
        **{name: value for kind in rng.sample(kinds, rng.randrange(1, 6)) for name, value in kind.items()}
    )


class Verification:
    """Requests with outputs of their own, windows of drafts that repeat tokens, and rows of padding."""

    def __init__(self, vocab_size, bs, seed, device="cpu"):
        rng = random.Random(seed)
        self.outputs = [[rng.randrange(vocab_size) for _ in range(rng.randrange(12))] for _ in range(bs)]
        self.adjustments = [some_adjustment(rng, vocab_size) if rng.random() < 0.7 else None for _ in range(bs)]
        # Few different tokens, so that drafts repeat each other and the output.
        self.windows = [[rng.choice([0, 1, vocab_size - 1]) for _ in range(rng.randrange(1, 6))] for _ in range(bs)]
        lens = torch.tensor([len(window) for window in self.windows])
        self.num_rows, padding = int(lens.sum()), 3
        indptr = torch.nn.functional.pad(lens.cumsum(0), (1, 0))
        row = torch.arange(self.num_rows)
        requests = torch.searchsorted(indptr, row, right=True) - 1
        columns = row - indptr[requests]
        tokens = torch.tensor([token for window in self.windows for token in window])
        # What padding of captured graphs looks like.
        requests = torch.cat([requests, torch.full((padding,), bs + 4)])
        columns = torch.cat([columns, torch.full((padding,), 9)])
        tokens = torch.cat([tokens, torch.zeros(padding, dtype=torch.int64)])
        self.layout = [part.to(device) for part in (requests, columns, tokens, indptr)]
        generator = torch.Generator().manual_seed(seed)
        self.logits = torch.randn(self.num_rows + padding, vocab_size, generator=generator) * 4
        self.table = AdjustmentTable.empty(1, vocab_size, device)
        slots, free = [], rng.sample(range(bs), bs)
        self.table = self.table.grown(bs)
        for adjustment, output in zip(self.adjustments, self.outputs, strict=True):
            slots.append(-1 if adjustment is None else free.pop())
            if adjustment is not None:
                self.table.set(slots[-1], some_adjustment(rng, vocab_size), [0, 0, 1])  # of an earlier request
                self.table.set(slots[-1], adjustment, output)
        self.slots = torch.tensor(slots, device=device)

    def expected(self):
        rows = iter(self.logits.tolist())
        adjusted = []
        for adjustment, output, window in zip(self.adjustments, self.outputs, self.windows, strict=True):
            for column in range(len(window)):
                row = next(rows)
                seen = output + window[1 : column + 1]
                adjusted.append(row if adjustment is None else literal_adjust(row, adjustment, seen))
        return torch.tensor([*adjusted, *rows], dtype=torch.float64)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("vocab_size", "bs", "seed"), [(7, 1, 0), (7, 1, 1), (50, 9, 0), (300, 12, 77), (2500, 3, 1)])
def test_rows_equal_the_literal_loop(vocab_size, bs, seed, dtype, device):
    """Both forms agree to the bit, and leave other rows alone. Narrow logits are rounded once."""
    case = Verification(vocab_size, bs, seed, device)
    case.logits = case.logits.to(dtype).float()
    found = [case.logits.to(device, dtype, copy=True) for _ in range(2)]
    for form, logits in zip((adjust, adjust.reference), found, strict=True):
        form(logits, case.table, case.slots, *case.layout)
    narrow = {"rtol": 2**-7, "atol": 0}  # Triton's interpreter truncates
    tolerance = {"rtol": RTOL, "atol": RTOL * 50} if dtype == torch.float32 else narrow
    for logits in found:
        torch.testing.assert_close(logits.cpu().double(), case.expected(), **tolerance)
    if dtype == torch.float32:
        assert torch.equal(*found)
    untouched = [row for row, owner in enumerate(case.layout[0].tolist()) if owner >= bs or case.slots[owner] < 0]
    assert len(untouched) >= 3
    assert torch.equal(found[0][untouched].float().cpu(), case.logits[untouched])


def test_output_that_was_counted_equals_output_that_was_given():
    case = Verification(40, 8, seed=3)
    fresh = AdjustmentTable.empty(len(case.table), 40, "cpu")
    for adjustment, slot in zip(case.adjustments, case.slots.tolist(), strict=True):
        if adjustment is not None:
            fresh.set(slot, adjustment, [])
    for first in range(0, 12, 4):  # steps that commit up to four tokens, some of them none
        tokens = torch.tensor([[*output[first : first + 4], -1, -1, -1, -1, -1][:5] for output in case.outputs])
        fresh.count(case.slots, tokens)
    assert torch.equal(fresh.counts, case.table.counts)
    assert torch.equal(fresh.num_outputs, case.table.num_outputs)
