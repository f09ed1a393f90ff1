"""Tests of a policy's decision within what requests ask for, of the drafts that it selects, and of their order."""

from contextlib import nullcontext

import pytest
import torch
from dspark_kernels import DraftBlock, RoundKeys, SamplingBatch, kernels_anywhere
from hypothesis import given
from hypothesis import strategies as st

from sglang_dspark.step.decision import PLAIN, StepDecision
from sglang_dspark.step.selection import EarlyStop, FixedLength, FixedLens, Threshold, TopDrafts, TopK, build_plan
from sglang_dspark.step.state import Confidence, DecodeBatch, DraftOutput, RequestLimits

GAMMA = 3
SURVIVAL = torch.tensor([[0.9, 0.8, 0.7], [0.6, 0.5, 0.4], [0.3, 0.2, 0.1]])


def lens_within(decision, limits, survival=SURVIVAL):
    """Lengths of a step of three requests whose blocks have these survivals."""
    logits = torch.logit(torch.tensor([[0.9, 0.9, 0.9], [0.9, 0.4, 0.9], [0.3, 0.9, 0.9]]))
    block = DraftBlock(torch.zeros(3, GAMMA, dtype=torch.int64), logits)
    predicted = None if survival is None else Confidence(logits, survival)
    within = decision.within(limits)
    return within.select(DraftOutput(block, predicted, within.draft_lens(3))).verify_lens.tolist()


def test_a_capped_request_leaves_its_share_to_the_others():
    top = StepDecision(GAMMA, TopK(4))
    assert lens_within(top, RequestLimits((3, 3, 3))) == [3, 1, 0]
    assert lens_within(top, RequestLimits((1, 3, 3))) == [1, 3, 0]
    assert lens_within(top, RequestLimits((0, 1, 1))) == [0, 1, 1]
    assert top.within(RequestLimits((0, 1, 2))).max_drafts(3) == 3  # of which rows are laid out
    forced = StepDecision(GAMMA, TopK(4, probe_request=2))
    assert lens_within(forced, RequestLimits((3, 3, 2))) == [2, 0, 2]


def test_a_bound_by_confidence_cuts_blocks_where_it_says():
    top = StepDecision(GAMMA, TopK(9))
    assert lens_within(top, RequestLimits((3, 3, 3), (0.5, 0.5, 0.0))) == [3, 1, 3]
    assert lens_within(top, RequestLimits((2, 3, 3), (0.0, 0.5, 0.5))) == [2, 1, 0]


def test_a_fixed_length_within_limits_needs_no_survivals():
    assert lens_within(StepDecision(2, FixedLength()), RequestLimits((3, 1, 0)), survival=None) == [2, 1, 0]


@pytest.mark.parametrize(
    ("rule", "free"),
    [(Threshold(0.6), [3, 1, 0]), (EarlyStop(tuple(13 + drafts / 3 for drafts in range(3 * GAMMA + 1))), [3, 3, 2])],
)
def test_live_rules_within_limits(rule, free):
    decision = StepDecision(GAMMA, rule)
    assert lens_within(decision, RequestLimits((3, 3, 3))) == free
    assert lens_within(decision, RequestLimits((2, 0, 3)))[:2] == [min(free[0], 2), 0]
    bounded = lens_within(decision, RequestLimits((3, 3, 3), (0.0, 0.5, 0.5)))
    assert bounded == [free[0], min(free[1], 1), 0]


def test_a_forced_request_is_verified_in_full_and_one_alone_excludes_the_others():
    survival = torch.tensor([[0.9, 0.8, 0.7], [0.3, 0.2, 0.1]])
    block, confidence = DraftBlock(torch.zeros(2, GAMMA, dtype=torch.int64)), Confidence(None, survival)
    forced = StepDecision(GAMMA, TopK(4, probe_request=1))
    alone = StepDecision(GAMMA, TopK(3, probe_request=1), draft_requests=(1,))
    for decision, lens in ((forced, [1, 3]), (alone, [0, 3])):
        draft = DraftOutput(block, confidence, decision.draft_lens(2))
        assert decision.select(draft).verify_lens.tolist() == lens


DEPTH = 4


@st.composite
def choices(draw, requests):
    rule = draw(st.sampled_from([FixedLength, TopK, EarlyStop, Threshold]))
    depth = draw(st.integers(1, DEPTH))
    if rule is FixedLength:
        return draw(st.sampled_from([PLAIN, StepDecision(depth, FixedLength())]))
    if rule is not TopK:
        return StepDecision(depth, EarlyStop(()) if rule is EarlyStop else Threshold(0.5))
    drafted = draw(st.none() | st.sets(st.integers(0, requests - 1), min_size=1).map(lambda r: tuple(sorted(r))))
    budget = draw(st.integers(0, depth * (requests if drafted is None else len(drafted))))
    forced = draw(st.none() | st.sampled_from(range(requests) if drafted is None else drafted))
    return StepDecision(depth, TopK(budget, forced), draft_requests=drafted)


@st.composite
def cases(draw):
    requests = draw(st.integers(1, 5))
    lens = st.lists(st.integers(0, DEPTH), min_size=requests, max_size=requests)
    most = draw(lens.map(tuple))
    bounds = draw(st.none() | st.lists(st.sampled_from([0.0, 0.5]), min_size=requests, max_size=requests))
    thresholds = tuple(bounds) if bounds and any(bounds) else None
    limits = RequestLimits(most, thresholds) if thresholds or draw(st.booleans()) else None
    return draw(choices(requests)), limits, requests


@given(cases())
def test_nobody_gets_more_than_asked_for(case):
    decision, limits, requests = case
    within = decision.within(limits)
    allowed = (DEPTH,) * requests if limits is None else limits.max_verify
    if within.limits is None:
        # Nothing binds, or nothing is left to verify.
        assert within in (decision, PLAIN)
        if within is not PLAIN and decision.draft_len:
            drafted = range(requests) if decision.draft_requests is None else decision.draft_requests
            assert all(allowed[r] >= decision.draft_len for r in drafted)
        return
    most = within.limits.max_verify
    assert not within.is_fixed(requests)
    drafted = set(range(requests) if within.draft_requests is None else within.draft_requests)
    for r in range(requests):
        assert most[r] <= min(allowed[r], within.draft_len if r in drafted else 0)
    assert within.selection.probe_request is None or within.selection.probe_request in drafted
    if isinstance(within.selection, TopK):
        assert within.selection.budget <= sum(most)
        if isinstance(decision.selection, TopK):
            assert within.selection.budget <= decision.selection.budget


@given(st.integers(1, 5), st.integers(0, DEPTH))
def test_limits_that_do_not_bind_change_nothing(requests, depth):
    decision = StepDecision(depth, TopK(requests * depth // 2)) if depth else PLAIN
    assert decision.within(RequestLimits((DEPTH,) * requests)) == decision.within(None) == decision


def test_a_fixed_length_becomes_ragged():
    within = StepDecision(3, FixedLength()).within(RequestLimits((7, 1, 0)))
    assert (within.selection, within.draft_requests) == (TopK(4), (0, 1))
    assert within.max_drafts(3) == 4


def test_bounds_by_confidence_leave_the_total_open():
    within = StepDecision(3, TopK(4)).within(RequestLimits((3, 3), (0.5, 0.0)))
    assert within.has_threshold
    assert within.max_drafts(2) == 4


def test_a_request_that_may_verify_nothing_is_not_drafted():
    decision = StepDecision(3, TopK(6)).within(RequestLimits((3, 0)))
    assert decision.draft_requests == (0,)
    assert decision.draft_lens(2) == [3, 0]
    assert not StepDecision(3, FixedLength(), draft_requests=(0,)).is_fixed(2)


PREFIXES = [10, 0, 200]
DRAFTS = torch.tensor([[11, 12, 13], [21, 22, 23], [31, 32, 33]])


@pytest.fixture
def step():
    prefix_lens = torch.tensor(PREFIXES)
    requests = torch.tensor([4, 1, 2])
    return DecodeBatch(
        anchors=torch.tensor([10, 20, 30]),
        prefix_lens=prefix_lens,
        req_pool_indices=requests,
        req_to_token=(1000 * torch.arange(5)[:, None] + torch.arange(300)).int(),
        rows=SamplingBatch.from_lists([0.0] * 3, [-1] * 3, [1.0] * 3, [0.0] * 3, [None] * 3),
        keys=RoundKeys(seed=1, step=1, request_keys=requests, positions=prefix_lens + 1),
    )


def ragged_plan(step, lens):
    return build_plan(step.requests, DRAFTS, TopDrafts.of_lengths(torch.tensor(lens), GAMMA))


def rows_of(plan, request):
    start, end = plan.indptr[request], plan.indptr[request + 1]
    return [t[start:end].tolist() for t in (plan.input_ids, plan.positions, plan.slots, plan.columns)]


@pytest.mark.parametrize("lens", [[0, 3, 1], [3, 0, 0], [1, 2, 3], [0, 0, 0]])
def test_ragged(step, lens):
    plan = ragged_plan(step, lens)
    assert plan.width == GAMMA + 1
    assert plan.indptr.tolist() == [0, 1 + lens[0], 2 + lens[0] + lens[1], 3 + sum(lens)]
    for request, verify_len in enumerate(lens):
        ids, positions, slots, columns = rows_of(plan, request)
        assert ids == [10 * (request + 1), *DRAFTS[request, :verify_len].tolist()]
        assert positions == [PREFIXES[request] + j for j in range(verify_len + 1)]
        row = int(step.req_pool_indices[request])
        assert slots == [1000 * row + position for position in positions]
        assert columns == list(range(verify_len + 1))


SELECTED_SURVIVAL = torch.tensor([[0.9, 0.5, 0.1], [2.0, 2.0, -1.0], [0.6, 0.5, 0.4]])
SELECTED = {
    "all": FixedLens(3, 3, torch.device("cpu")),
    "some of each": FixedLens(2, 3, torch.device("cpu")),
    **{f"best {budget}": TopDrafts(SELECTED_SURVIVAL, budget) for budget in (1, 4, 7)},
}


@pytest.mark.parametrize("kernels", [False, pytest.param(True, marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", SELECTED)
def test_every_selection_is_the_ragged_plan_of_its_lengths(step, name, kernels):
    """On a GPU, here by Triton's interpreter, too. A draft must not be verified, and others have to be."""
    selected = SELECTED[name]
    with kernels_anywhere() if kernels else nullcontext():
        plan = build_plan(step.requests, DRAFTS, selected)
    ragged = ragged_plan(step, selected.verify_lens.tolist())
    for part in ("verify_lens", "indptr", "requests", "columns", "input_ids", "positions", "slots"):
        assert torch.equal(getattr(plan, part), getattr(ragged, part)), part
    assert plan.width == (3 if name == "some of each" else 4)


def test_verifying_nothing_needs_no_drafts(step):
    nothing = FixedLens(0, 3, torch.device("cpu"))
    assert build_plan(step.requests, DRAFTS[:, :0], nothing).input_ids.tolist() == [10, 20, 30]
