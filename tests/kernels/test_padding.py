"""Whatever stands in rows of padding, every function with kernels gives real rows the same result, to the bit.

Captured steps have room for more requests and rows than a step has. Models may write anything there: NaN, or numbers
that no other row comes near.
"""

import importlib
import pkgutil

import dspark_kernels
import pytest
import torch
from acceptance_cases import make_case
from draft_heads import as_weights, draft_heads
from dspark_kernels import (
    Adjustment,
    AdjustmentTable,
    CommitRows,
    DeltaGates,
    DeltaInputs,
    Dispatched,
    PagedWindows,
    PreparedStep,
    ReplayedRows,
    RoundKeys,
    SamplingBatch,
    StateRows,
    StepRequests,
    VerifyRows,
)

FILLS = [float("nan"), 1e30]
GARBAGE = 2**40 + 7  # of integers


class Case:
    """Builds the arguments of one call: a function below takes the form, and returns what real rows get.

    Args:
        fill: what floating-point numbers of padding are; None for what the generator gives.
    """

    def __init__(self, device, fill):
        self.device, self.fill = device, fill
        self._generator = torch.Generator().manual_seed(5)

    def rand(self, *shape, real=None):
        """Random numbers, of which the first ``real`` along the first dimension are no padding."""
        return self.spoilt(torch.randn(*shape, generator=self._generator), real)

    def ints(self, *shape, most, real=None):
        """Likewise integers below ``most``."""
        return self.spoilt(torch.randint(most, shape, generator=self._generator), real)

    def spoilt(self, tensor, real):
        """``tensor`` on the device, with padding from ``real`` on; None for a tensor without."""
        tensor = tensor.to(self.device)
        if real is not None and self.fill is not None:
            tensor[real:] = self.fill if tensor.is_floating_point() else GARBAGE
        return tensor

    def pool(self, owned, slots=40):
        """K and V of which only the slots ``owned`` belong to anybody; slot 0 is where padding is written to."""
        pools = self.rand(slots, 2, 16), self.rand(slots, 2, 16)
        if self.fill is not None:
            for pool in pools:
                pool[[slot for slot in range(slots) if slot not in owned]] = self.fill
        return pools


def attention_case(case):
    """Two real requests of three, with contexts of 20 and 15 tokens: the reference attends them in one call."""
    table = torch.zeros(3, 30, dtype=torch.int32)
    table[1, :20], table[2, :15] = torch.arange(1, 21), torch.arange(22, 37)
    pool = case.pool(owned={*range(1, 21), *range(22, 37)})
    lens, rows = torch.tensor([20, 15, 0], device=case.device), torch.tensor([1, 2, 0], device=case.device)
    return table.to(case.device), rows, lens, pool


def window_attention(form, case):
    table, rows, lens, pool = attention_case(case)
    q, k, v = case.rand(9, 4, 16, real=6), case.rand(9, 2, 16, real=6), case.rand(9, 2, 16, real=6)
    indptr = torch.tensor([0, 2, 6, 6], device=case.device)
    windows = PagedWindows(table, rows, lens, indptr, 4)
    return [form(q, (k, v), pool, windows, causal=True, scale=0.25, splits=splits) for splits in (1, 2)]


def block_attention(form, case):
    table, rows, lens, pool = attention_case(case)
    q, k, v = case.rand(12, 4, 16, real=8), case.rand(12, 2, 16, real=8), case.rand(12, 2, 16, real=8)
    attend = form(StepRequests(lens, lens, rows, table), 4, heads_per_kv=2, dtype=q.dtype, scale=0.25)
    return [attend(q, k, v, pool, None)[:8]]


def suffix_match(form, case):
    table, rows, lens, _ = attention_case(case)
    anchors = torch.tensor([3, 4, 0], device=case.device)
    tokens = torch.arange(40) % 5
    if case.fill is not None:
        tokens[[0, 21, 37, 38, 39]] = GARBAGE  # slots of nobody's
    return [form(StepRequests(anchors, lens, rows, table), tokens.to(case.device), 6)[:2]]


def kv_inject(form, case):
    """Rows 0, 1 and 3 are committed, 2 is a rejected draft; behind them the tier's padding."""
    pools = tuple(torch.zeros(2, 9, 2, 8, device=case.device) for _ in range(2))
    projected = case.rand(7, 2 * 2 * 2 * 8)
    if case.fill is not None:
        projected[[2, 4, 5, 6]] = case.fill
    columns, requests = torch.tensor([0, 1, 2, 0, 9, 9, 9]), torch.tensor([0, 0, 0, 1, 1, 1, 1])
    rows = CommitRows(*(part.to(case.device) for part in (columns, requests, torch.tensor([1, 0]))))
    positions, slots = torch.tensor([4, 5, 6, 2, 0, 0, 0]), torch.tensor([3, 4, 5, 7, 0, 0, 0])
    given = case.rand(2, 8), 1e-6, torch.full((4,), 0.1, device=case.device)
    form(projected, *given, positions.to(case.device), slots.to(case.device), pools, rows)
    return [pool[:, 1:] for pool in pools]


def qk_norm_rope(form, case):
    q, k = case.rand(5, 4, 8, real=3), case.rand(5, 2, 8, real=3)
    given = case.rand(8), case.rand(8), 1e-6, torch.full((4,), 0.1, device=case.device)
    return [part[:3] for part in form(q, k, *given, case.ints(5, most=90, real=3))]


def add_norm(form, case):
    hidden, update = case.rand(5, 40, real=3), case.rand(5, 40, real=3)
    return [part[:3] for part in form(hidden, update, case.rand(40), 1e-6)]


def silu_mul(form, case):
    return [form(case.rand(5, 40, real=3))[:3]]


def heads(case):
    modules = draft_heads("vanilla", vocab_size=150, hidden_size=6, block_size=3)
    return as_weights(*(module.to(case.device) for module in modules))


def block_confidence(form, case):
    weights = heads(case)
    tokens, anchors = case.ints(5, 3, most=150), case.ints(5, most=150)
    return [form(case.rand(5, 3, 6, real=3), anchors, tokens, weights.confidence, weights.w1)[:3]]


def draft_block(form, case):
    temperatures = torch.tensor([0.0, 0.8, 1.2, 0.9, 0.0], device=case.device)
    keys = RoundKeys(3, 4, torch.arange(5, device=case.device), torch.zeros(5, dtype=torch.int64, device=case.device))
    block = form(
        case.rand(5, 3, 150, real=3),
        case.rand(5, 3, 6, real=3),
        case.ints(5, most=150),
        heads(case),
        SamplingBatch.by_temperature(5, temperatures, case.device),
        keys,
    )
    assert ((block.tokens >= 0) & (block.tokens < 150)).all()
    distribution = block.distribution.probs() if block.probs is None else block.probs
    return [block.tokens[:3], block.confidence_logits[:3], distribution[1:3]]


def accept(form, case):
    """Greedy, sampled, filtered and seeded requests; request slots without one, and rows behind the last."""
    found = make_case(case.device, [0.0, 1.0, 0.7, 0.9, 0.0], 4, 111, slots=2)
    block, windows, logits, prefix_lens = found.given
    rules = [[0.0, 1.0, 0.7, 0.9, 0.0, 1.0, 1.0], [-1, -1, 20, -1, -1, -1, -1], [1.0, 1.0, 0.9, *[1.0] * 4], [0.0] * 7]
    rows = SamplingBatch.from_lists(*rules, [None, None, None, 11, None, None, None], case.device)
    for part in (block.distribution.scores, block.distribution.log_norms):
        part.copy_(case.spoilt(part.cpu(), 5))
    logits = torch.cat([logits, case.rand(4, 111, real=0)])
    judged = form(block, windows, logits, prefix_lens, rows, found.keys)
    return [part[:5] for part in vars(judged).values()]


def adjust(form, case):
    table = AdjustmentTable.empty(2, 50, case.device)
    table.set(0, Adjustment(frequency=0.5, repetition=1.3), [1, 2, 2])
    table.set(1, Adjustment(logit_bias={7: -100.0}, presence=0.2), [4])
    layout = [[0, 0, 1, 6, 6], [0, 1, 0, 9, 9], [5, 2, 8, 0, 0], [0, 2, 3]]
    logits = case.rand(5, 50, real=3)
    slots = torch.tensor([0, 1], device=case.device)
    form(logits, table, slots, *(torch.tensor(part, device=case.device) for part in layout))
    return [logits[:3]]


def step(case):
    """Three requests in five slots, whose rest a captured step would have cleared."""
    table = case.ints(6, 30, most=10_000).int()
    requests = [case.ints(5, most=most, real=3) for most in (50, 20, 6)]
    return StepRequests(*requests, table, torch.tensor([3], device=case.device))


def plan_of(rows):
    real = int(rows.indptr[-1])
    parts = {name: part[:real] for name, part in vars(rows).items() if name not in ("verify_lens", "indptr")}
    return [rows.verify_lens[:3], rows.indptr[:4], *parts.values()]


def plan_top(form, case):
    survival = case.rand(5, 4, real=3).abs()
    return plan_of(form(survival, 6, case.ints(5, 4, most=90, real=3), step(case), 16))


def plan_uniform(form, case):
    return plan_of(form(2, case.ints(5, 4, most=90, real=3), step(case), 16))


def plan_staged(form, case):
    out, numbers = VerifyRows.empty(6, 16, case.device), torch.tensor([6, -1, 1], device=case.device)
    return plan_of(form(case.rand(5, 4, real=3).abs(), numbers, case.ints(5, 4, most=90, real=3), step(case), out))


def prepare(form, case):
    requests = step(case)
    real = StepRequests(*(getattr(requests, name)[:3] for name in ("anchors", "prefix_lens", "req_pool_indices")), None)
    buffers = PreparedStep.empty(5, 4, case.device)
    for part in vars(buffers).values():
        case.spoilt(part.zero_(), 0)
    return list(vars(form(real, 4, 77, buffers)).values())


def distribution_loss(form, case):
    """Training has no padding; a position whose teacher is broken must not harm the others."""
    logits, target = case.rand(5, 60, real=3), case.rand(5, 60, real=3)
    given = case.ints(5, most=60), case.rand(5).abs()
    return [part[:3] for part in form(logits, target, None, *given, ce_weight=0.3, tv_weight=0.9)]


def state_rows(case):
    """Two real requests of five request slots, with three rows and one, in state slots 3 and 1."""
    return torch.tensor([0, 3, 4, 4, 4, 4], device=case.device), case.spoilt(torch.tensor([3, 1, -1, 0, 2]), 2)


def replayed_rows(case):
    """Two rows of the first request are replayed, and the first one is tracked in slot 4."""
    parts = torch.tensor([[2, 1, 0, 0, 0], [1, 0, 0, 0, 0], [4, -1, 0, 0, 0]]).unbind()
    return ReplayedRows(*state_rows(case), *(case.spoilt(part.clone(), 2) for part in parts))


def state_pool(case, *shape):
    """A pool of six slots, of which 1 and 3 belong to requests."""
    pool = case.rand(6, *shape)
    if case.fill is not None:
        pool[[0, 2, 4, 5]] = case.fill
    return pool


def delta_rows(case):
    return [case.rand(7, *shape, real=4) for shape in ((1, 6), (1, 6), (2, 5), (2,), (2,))]


def gated_delta(form, case):
    q, *inputs = delta_rows(case)
    gates = DeltaGates(case.rand(2), case.rand(2))
    out = form(q, DeltaInputs(*inputs), gates, state_pool(case, 2, 5, 6), StateRows(*state_rows(case)))
    assert not out[4:].any()
    return [out]


def commit_gated_delta(form, case):
    _, *inputs = delta_rows(case)
    pools = state_pool(case, 2, 5, 6)[None]
    gates = DeltaGates(case.rand(1, 2), case.rand(1, 2))
    form(DeltaInputs(*(x[None] for x in inputs)), gates, pools, replayed_rows(case))
    return [pools[:, [1, 3, 4]]]


def causal_conv_rows(form, case):
    weight, windows = case.rand(5, 4), state_pool(case, 5, 3)
    out = form(case.rand(7, 5, real=4), weight, case.rand(5), windows, StateRows(*state_rows(case)))
    assert not out[4:].any()
    return [out]


def commit_conv_windows(form, case):
    windows = state_pool(case, 5, 3)[None]
    form(case.rand(7, 5, real=4)[None], windows, replayed_rows(case))
    return [windows[:, [1, 3, 4]]]


CASES = [
    window_attention,
    block_attention,
    suffix_match,
    kv_inject,
    qk_norm_rope,
    add_norm,
    silu_mul,
    block_confidence,
    draft_block,
    accept,
    adjust,
    plan_top,
    plan_uniform,
    plan_staged,
    prepare,
    gated_delta,
    commit_gated_delta,
    causal_conv_rows,
    commit_conv_windows,
    distribution_loss,
]


@pytest.mark.parametrize("fill", FILLS, ids=str)
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.__name__)
def test_padding_changes_no_real_row(case, fill, device):
    function = getattr(dspark_kernels, case.__name__)
    for form in (function, function.reference):
        expected, found = (case(form, Case(device, padding)) for padding in (None, fill))
        for clean, beside_padding in zip(expected, found, strict=True):
            assert torch.equal(clean, beside_padding)
            assert not clean.is_floating_point() or clean.isfinite().all()


def test_every_function_with_kernels_has_a_case():
    modules = [
        importlib.import_module(found.name)
        for found in pkgutil.walk_packages(dspark_kernels.__path__, "dspark_kernels.")
    ]
    functions = {name for module in modules for name, value in vars(module).items() if isinstance(value, Dispatched)}
    assert functions == {case.__name__ for case in CASES}
