"""A call of every function that has kernels, at several sizes, with padding after what is real.

A case takes the form to be called and a :class:`Made`, and returns what real rows get. Captured steps have room for
more requests and rows than a step has, and models may write anything there.

Memory as bad as memory can be: what ``torch.empty`` and its like return holds NaN, or integers far off any index.
"""

from contextlib import contextmanager
from unittest.mock import patch

import recurrent_cases  # noqa: F401
import torch
from acceptance_cases import DTYPES, make_case
from draft_heads import as_weights, draft_heads
from dspark_kernels import (
    QUANTILES,
    Adjustment,
    AdjustmentTable,
    CommitRows,
    HeldRows,
    Int8Weight,
    PagedWindows,
    PlanNumbers,
    PreparedStep,
    RoundKeys,
    SamplingBatch,
    SimulatedDraws,
    StepRequests,
    VerifyRows,
)
from kernel_calls import CASES, GARBAGE, case

__all__ = ["CASES"]

EPS = 1e-5
# Triton's interpreter multiplies the bit patterns of bfloat16.
HALF = torch.bfloat16 if torch.cuda.is_available() else torch.float16
SUMMED = {"atol": 2e-5, "rtol": 2e-5}  # sums of up to 2053 products in float32, in different orders
LOSSES = {torch.float32: {"atol": 1e-6, "rtol": 2e-5}, torch.bfloat16: {"atol": 1e-6, "rtol": 2e-2}}


# ---- layers


@case((3, 40), (1, 1), (7, 40), (3, 513), (2, 2560), (0, 24), dtypes=DTYPES)
def add_norm(form, made, rows, size):
    """The rows of one operand lie apart."""
    hidden, update = (made.rand(made.room(rows), width, real=rows) for width in (size + 3, size))
    return [part[:rows] for part in form(hidden[:, :size], update, made.rand(size), EPS)]


@case((3, 20), (1, 1), (7, 40), (5, 513), (3, 1536), (0, 2), dtypes=DTYPES)
def silu_mul(form, made, rows, size):
    return [form((4 * made.rand(made.room(rows), 2 * size + 3, real=rows))[:, : 2 * size])[:rows]]


@case(
    *((3, 20, 37, True), (1, 1, 1, False), (17, 40, 16, True), (65, 150, 70, False), (0, 4, 4, True)),
    dtypes=(torch.float32, HALF),
)
def int8_linear(form, made, rows, size, out, biased):
    weight, bias = Int8Weight.of(made.rand(out, size)), made.rand(out) if biased else None
    return [form(made.rand(made.room(rows), size + 3, real=rows)[:, :size], weight, bias)[:rows]]


@case(
    *((3, 4, 2, 8), (1, 1, 1, 24), (7, 9, 3, 64), (5, 6, 6, 24), (33, 8, 2, 128), (3, 4, 1, 2), (0, 4, 2, 64)),
    dtypes=DTYPES,
)
def qk_norm_rope(form, made, rows, heads, kv_heads, head_dim):
    """Queries and keys are columns of wider matrices, as a fused projection returns them."""
    q = made.rand(made.room(rows), heads + 1, head_dim, real=rows)[:, 1:]
    k = made.rand(made.room(rows), 2 * kv_heads, head_dim, real=rows)[:, :kv_heads]
    given = made.rand(head_dim), made.rand(head_dim), EPS, frequencies(made, head_dim)
    return [part[:rows] for part in form(q, k, *given, made.numbers(made.room(rows), most=2000, real=rows))]


def frequencies(made, head_dim):
    return (1.0 / 1e6 ** (torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim)).to(made.device)


@case(
    *((4, 2, 2, 8), (1, 1, 1, 24), (7, 3, 3, 64), (17, 5, 8, 128), (33, 2, 5, 96), (4, 2, 1, 2), (0, 2, 3, 64)),
    dtypes=DTYPES,
)
def kv_inject(form, made, rows, layers, heads, head_dim):
    """Rows of a wider matrix are written, except every third one, a rejected draft, and the padding after them."""
    width, slots, room = layers * 2 * heads * head_dim, rows + 12, made.room(rows)
    projected = made.rand(room, width + 5, real=rows)[:, :width]
    if made.fill is not None:
        projected[2:rows:3] = made.fill
    columns = torch.arange(room) % 3
    requests = torch.cat([torch.arange(rows) // 3, torch.full((room - rows,), rows)])
    kept = CommitRows(*(x.to(made.device) for x in (columns, requests, torch.ones(rows, dtype=torch.int64))))
    places = torch.cat(
        [1 + torch.randperm(slots - 1, generator=torch.Generator().manual_seed(0))[:rows], torch.zeros(room - rows)]
    )
    pools = tuple(torch.zeros(layers, slots, heads, head_dim, dtype=made.dtype, device=made.device) for _ in range(2))
    given = made.rand(layers, head_dim), EPS, frequencies(made, head_dim), made.numbers(room, most=2000)
    form(projected, *given, places.long().to(made.device), pools, kept)
    return [pool[:, 1:] for pool in pools]


@case((3, 20), (1, 1), (7, 2500), (12, 40), (0, 24), dtypes=DTYPES)
def hold_rows(form, made, rows, width):
    """Twice, after rows that have come, over the end of a ring; rows may lie apart."""
    held = HeldRows.empty(12, width, made.dtype, made.device)
    held.end.fill_(8)
    for _ in range(2):
        features, room = made.rand(rows, width + 3)[:, :width], made.room(rows)
        form(features, made.numbers(room, most=99)[:rows], made.numbers(room, most=99)[:rows].int(), held)
    return [held.features, held.positions, held.slots, held.end]


# ---- attention


def contexts(made):
    """Two real requests of three, with contexts of 20 and 15 tokens, and K and V of these; padding has slot 0."""
    table = torch.zeros(3, 30, dtype=torch.int32)
    table[1, :20], table[2, :15] = torch.arange(1, 21), torch.arange(22, 37)
    owned = {*range(1, 21), *range(22, 37)}
    return (
        table.to(made.device),
        made.ints([1, 2, 0]),
        made.ints([20, 15, 0]),
        (made.pool(owned, 2, 16), made.pool(owned, 2, 16)),
    )


@case(tolerance={torch.float32: {"atol": 2e-6, "rtol": 2e-6}})
def window_attention(form, made):
    table, rows, lens, pool = contexts(made)
    q, k, v = (made.rand(9, heads, 16, real=6) for heads in (4, 2, 2))
    windows = PagedWindows(table, rows, lens, made.ints([0, 2, 6, 6]), 4)
    return [form(q, (k, v), pool, windows, causal=True, scale=0.25, splits=splits) for splits in (1, 2)]


# ---- drafting


@case()
def suffix_match(form, made):
    table, rows, lens, _ = contexts(made)
    tokens = torch.arange(40) % 5
    if made.fill is not None:
        tokens[[0, 21, 37, 38, 39]] = GARBAGE[torch.int64]  # slots that no request owns
    return [form(StepRequests(made.ints([3, 4, 0]), lens, rows, table), tokens.to(made.device), 6)[:2]]


def heads_of(made, vocab_size, gamma, width=6, rank=5, **options):
    sizes = {"vocab_size": vocab_size, "hidden_size": width, "block_size": gamma, "rank": rank}
    markov, confidence = draft_heads("vanilla", **sizes, **options)
    return as_weights(markov.to(made.device, made.dtype), confidence.to(made.device, made.dtype))


def selector_of(made, vocab_size, gamma, width=6):
    """One that chooses from four tokens."""
    sizes = {"vocab_size": vocab_size, "hidden_size": width, "block_size": gamma}
    return as_weights(draft_heads("selector", **sizes)[0].to(made.device, made.dtype), None, None, 4)


@case(
    *((3, 3, 6, 5), (1, 1, 1, 1), (3, 7, 6, 5), (2, 3, 1025, 40), (1, 2, 2048, 3), (3, 4, 6, 0)),
    dtypes=(torch.float32, HALF),
    tolerance={torch.float32: SUMMED, HALF: SUMMED},
)
def block_confidence(form, made, bs, gamma, width, rank):
    """A rank of 0 stands for a head without Markov embeddings."""
    weights = heads_of(made, 29, gamma, width, rank or 5, confidence_with_markov=rank > 0, std=0.3)
    tokens, anchors = made.numbers(bs + 2, gamma, most=29), made.numbers(bs + 2, most=29)
    w1 = weights.w1 if rank else None
    return [form(made.rand(bs + 2, gamma, width, real=bs), anchors, tokens, weights.confidence, w1)[:bs]]


@case((3, 4), (1, 1), (33, 7), (5, 9), (40, 16), (0, 3), dtypes=DTYPES)
def block_survival(form, made, bs, depth):
    """Columns of wider logits, some of them no numbers; without logits, what positions accept."""
    coefficients, logits = made.rand(2, depth + 2, dtype=torch.float32), made.rand(bs + 2, depth + 1, real=bs)
    fitted, found = coefficients[:, :depth], (4 * logits)[:, :depth]
    found[::4, depth // 2 :] = float("nan")
    return [form(fitted, found, bs + 2)[:bs], form(fitted.sigmoid(), None, bs)]


@case(tolerance={torch.float32: SUMMED})
def draft_block(form, made):
    keys = RoundKeys(3, 4, made.ints(range(5)), made.ints([0] * 5))
    rules = [0.0, 0.8, 1.2, 0.9, 0.0], [-1] * 5, [1.0] * 5, [0.0] * 5, [None] * 5
    rows = SamplingBatch.from_lists(*rules, made.device)
    base, hidden = made.rand(5, 3, 150, real=3), made.rand(5, 3, 6, real=3)
    drafted = []
    for heads in (heads_of(made, 150, 3), selector_of(made, 150, 3)):
        block = form(base, hidden, made.numbers(5, most=150), heads, rows, keys)
        assert ((block.tokens >= 0) & (block.tokens < 150)).all()
        drafted += [block.tokens[:3], block.confidence_logits[:3], block.distribution.probs()[1:3]]
    return drafted


@case((3, 4, 2, 24, 8), (1, 1, 1, 1, 1), (2, 7, 2, 1040, 16), (7, 3, 4, 6, 3), (0, 3, 2, 8, 4), dtypes=DTYPES)
def block_convolution(form, made, blocks, width, taps, size, group):
    """Kernels are columns of what a projection returns; some blocks are shorter than a kernel."""
    sizes = size, 2 * taps * size // group
    rows, dynamic = (made.rand(made.room(blocks) * width, columns, real=blocks * width) for columns in sizes)
    base, (_, behind) = made.rand(taps, size), dynamic.unflatten(-1, (2, taps, -1)).unbind(1)
    return [form(rows, base, behind, width)[: blocks * width]]


@case()
def accept(form, made):
    """Greedy, sampled, filtered and seeded requests; request slots without one, and rows after the last."""
    found = make_case(made.device, [0.0, 1.0, 0.7, 0.9, 0.0], 4, 111, slots=2)
    block, windows, logits, prefix_lens = found.given
    rules = [[0.0, 1.0, 0.7, 0.9, 0.0, 1.0, 1.0], [-1, -1, 20, -1, -1, -1, -1], [1.0, 1.0, 0.9, *[1.0] * 4], [0.0] * 7]
    rows = SamplingBatch.from_lists(*rules, [None, None, None, 11, None, None, None], made.device)
    scores, log_norms = block.distribution.scores, block.distribution.log_norms
    for of_padding in (scores, log_norms):
        made.spoilt(of_padding, 5)
    if made.fill is not None:  # drafts that are not verified
        behind = torch.arange(4, device=made.device) >= windows.verify_lens[:, None]
        block.tokens[behind], scores[behind], log_norms[behind] = -1, made.fill, made.fill
    logits = torch.cat([logits, made.rand(4, 111, real=0)])
    return [part[:5] for part in vars(form(block, windows, logits, prefix_lens, rows, found.keys)).values()]


def draws_of(made, gamma):
    """Draws, and five requests of these, two of them padding."""
    quantiles = torch.rand(gamma, QUANTILES, generator=torch.Generator().manual_seed(2)).sort(dim=1).values
    keys = [2**32 - 1, 0, 77, 2**31, 5]
    draws = SimulatedDraws(made.ints(keys), quantiles.to(made.device))
    return draws, made.numbers(5, most=5), made.spoilt(made.ints([0, 15, 2**31, 900, 31]), 3)


@case((7,), (1,), (0,), (8,))
def simulated_accept(form, made, gamma):
    """Whole blocks, and the first drafts of each, which are a part of a wider buffer."""
    given, drafts = draws_of(made, gamma), made.numbers(5, gamma + 3, most=900, real=3)[:, :gamma]
    bonus, lens = made.numbers(5, most=900, real=3), made.numbers(5, most=gamma + 1, real=3)
    outcomes = form(*given, drafts, bonus), form(*given, drafts, bonus.int(), lens.int())
    return [part[:3] for outcome in outcomes for part in vars(outcome).values()]


@case((7,), (1,), tolerance={torch.float32: {"atol": 2e-6, "rtol": 2e-6}})
def simulated_confidence(form, made, gamma):
    return [form(*draws_of(made, gamma), gamma)[:3]]


@case(in_place=True)
def adjust(form, made):
    table = AdjustmentTable.empty(2, 50, made.device)
    table.set(0, Adjustment(frequency=0.5, repetition=1.3), [1, 2, 2])
    table.set(1, Adjustment(logit_bias={7: -100.0}, presence=0.2), [4])
    logits = made.rand(5, 50, real=3)
    layout = [[0, 0, 1, 6, 6], [0, 1, 0, 9, 9], [5, 2, 8, 0, 0], [0, 2, 3]]
    form(logits, table, made.ints([0, 1]), *map(made.ints, layout))
    return [logits[:3]]


@case(
    *((3, 60, False), (3, 64, True), (2, 2048, False), (2, 2049, True), (1, 5000, True)),
    dtypes=LOSSES,
    tolerance=LOSSES,
    in_place=True,
)
def distribution_loss(form, made, n, v, weighted):
    """Training has no padding; a position whose teacher is broken must not harm the others. Some have no label."""
    logits, target = 3 * made.rand(n + 2, v, real=n), 3 * made.rand(n + 2, v, real=n)
    log_weight = made.rand(v, dtype=torch.float32).abs() if weighted else None
    given = made.numbers(n + 2, most=v + 1) - 1, made.rand(n + 2, dtype=torch.float32).abs()
    return [part[:n] for part in form(logits, target, log_weight, *given, ce_weight=0.3, tv_weight=0.9)]


# ---- planning


def step(made):
    """Three requests in five slots, whose rest a captured step would have cleared."""
    table = made.numbers(6, 30, most=10_000).int()
    requests = [made.numbers(5, most=most, real=3) for most in (50, 20, 6)]
    return StepRequests(*requests, table, made.ints([3]))


def plan_of(rows):
    real = int(rows.indptr[-1])
    parts = {name: part[:real] for name, part in vars(rows).items() if name not in ("verify_lens", "indptr")}
    return [rows.verify_lens[:3], rows.indptr[:4], *parts.values()]


@case()
def plan_top(form, made):
    survival = made.rand(5, 4, real=3).abs()
    return plan_of(form(survival, 6, made.numbers(5, 4, most=90, real=3), step(made), 16))


@case()
def plan_uniform(form, made):
    return plan_of(form(2, made.numbers(5, 4, most=90, real=3), step(made), 16))


@case()
def plan_staged(form, made):
    out, drafts = VerifyRows.empty(6, 16, made.device), made.numbers(5, 4, most=90, real=3)
    survival, weights = made.rand(5, 4, real=3).abs(), made.rand(5, real=3).abs()
    return plan_of(form(survival, weights, made.ints([6, -1, 1]), drafts, step(made), out))


@case((3, 5, 4), (1, 1, 1), (3, 8, 5), (17, 40, 5), (40, 40, 16))
def prepare(form, made, bs, num_slots, gamma):
    requests = [made.numbers(bs, most=most) for most in (50, 20, 6)]
    buffers = PreparedStep.empty(num_slots, gamma, made.device)
    for buffer in vars(buffers).values():
        made.spoilt(buffer.zero_(), 0)
    return list(vars(form(StepRequests(*requests, None), gamma, 77, buffers, PlanNumbers(9, -1, 2))).values())


SENTINEL = -0x5A5A5A5B  # of int32 and int64
BYTE = 0x5A  # of every smaller integer, and true as a bool


def fill(tensor):
    """Poison a tensor, in place."""
    if tensor.is_floating_point() or tensor.is_complex():
        return tensor.fill_(torch.nan)
    return tensor.fill_(SENTINEL if tensor.dtype in (torch.int32, torch.int64) else BYTE)


@contextmanager
def poisoned_memory():
    """Inside, no allocation is clean by chance."""

    def poisoning(allocate):
        return lambda *args, **kwargs: fill(allocate(*args, **kwargs))

    with (
        patch.object(torch, "empty", poisoning(torch.empty)),
        patch.object(torch, "empty_like", poisoning(torch.empty_like)),
        patch.object(torch, "empty_strided", poisoning(torch.empty_strided)),
        patch.object(torch.Tensor, "new_empty", poisoning(torch.Tensor.new_empty)),
    ):
        yield
