"""A policy's decision within what single requests ask for."""

from hypothesis import given
from hypothesis import strategies as st

from sglang_dspark.step.decision import PLAIN, StepDecision
from sglang_dspark.step.limits import Limits
from sglang_dspark.step.selection import FixedLength, TopK

DEPTH = 4


@st.composite
def choices(draw, requests):
    rule = draw(st.sampled_from(Rule))
    depth = draw(st.integers(1, DEPTH))
    if rule is Rule.UNIFORM:
        return draw(st.sampled_from([PLAIN, StepDecision(rule, depth, depth * requests)]))
    if rule is not Rule.TOP:
        return StepDecision(rule, depth)
    drafted = draw(st.none() | st.sets(st.integers(0, requests - 1), min_size=1).map(lambda r: tuple(sorted(r))))
    budget = draw(st.integers(0, depth * (requests if drafted is None else len(drafted))))
    forced = draw(st.none() | st.sampled_from(range(requests) if drafted is None else drafted))
    return StepDecision(rule, depth, budget, forced=forced, drafted=drafted)


@st.composite
def cases(draw):
    requests = draw(st.integers(1, 5))
    lens = st.lists(st.integers(0, DEPTH), min_size=requests, max_size=requests)
    copied = draw(lens.map(tuple) | st.just((0,) * requests))
    most = tuple(c or m for c, m in zip(copied, draw(lens), strict=True))
    bounds = draw(st.none() | st.lists(st.sampled_from([0.0, 0.5]), min_size=requests, max_size=requests))
    return draw(choices(requests)), Limits(most, copied, tuple(bounds) if bounds and any(bounds) else None)


@given(cases())
def test_nobody_gets_more_than_asked_for(case):
    decision, limits = case
    within = decision.within(limits)
    requests = len(limits.most)
    if within.limits is None:
        # Nothing binds, or nothing is left to verify.
        assert within in (decision, PLAIN)
        if within is not PLAIN and decision.draft_len:
            drafted = range(requests) if decision.draft_requests is None else decision.draft_requests
            assert all(limits.most[r] >= decision.draft_len for r in drafted)
        assert not any(limits.copied)
        return
    most, copied = within.limits.most, within.limits.copied
    assert copied == limits.copied
    assert not within.is_uniform(requests)
    drafted = set(range(requests) if within.drafted is None else within.drafted) if within.depth else set()
    for r in range(requests):
        assert most[r] <= limits.most[r]
        if copied[r]:
            assert most[r] == copied[r]
            assert r not in drafted
        else:
            assert most[r] <= (within.depth if r in drafted else 0)
    assert within.forced is None or within.forced in drafted
    if within.rule is Rule.TOP:
        # All copied drafts fit beside what the policy wanted, and the budget never exceeds what is left.
        assert sum(copied) <= within.budget <= sum(most)
        if decision.rule is Rule.TOP:
            assert within.budget - sum(copied) <= decision.budget


@given(st.integers(1, 5), st.integers(0, DEPTH))
def test_limits_that_do_not_bind_change_nothing(requests, depth):
    decision = StepDecision(depth, TopK(requests * depth // 2)) if depth else PLAIN
    assert decision.within(Limits((DEPTH,) * requests, (0,) * requests)) == decision


def test_a_fixed_length_becomes_ragged():
    within = StepDecision(3, FixedLength()).within(Limits((7, 1, 0), (0, 0, 0)))
    assert (within.rule, within.budget, within.drafted) == (Rule.TOP, 4, (0, 1))
    assert within.most_drafts(3) == 4


def test_a_plain_step_verifies_copied_drafts_and_nothing_else():
    within = PLAIN.within(Limits((7, 2), (0, 2), (0.5, 0.0)))
    assert (within.depth, within.budget, within.drafted) == (0, 2, ())
    assert (within.limits, within.needs_confidence) == (Limits((0, 2), (0, 2)), False)


def test_bounds_by_confidence_leave_the_total_open():
    within = StepDecision(3, TopK(4)).within(Limits((3, 3), (0, 0), (0.5, 0.0)))
    assert within.needs_confidence
    assert within.most_drafts(2) == 4


def test_a_request_that_may_verify_nothing_is_not_drafted():
    decision = StepDecision(3, TopK(6)).within(Limits(most=(3, 0), copied=(0, 0)))
    assert decision.draft_requests == (0,)
    assert decision.draft_lens(2) == [3, 0]


def test_a_step_that_drafts_for_some_verifies_nothing_of_the_others():
    """Whatever the rule said of all of them."""
    some = StepDecision(3, FixedLength()).for_some([0, 2], 4)
    assert (some.rule, some.drafted, some.most_drafts(4)) == (Rule.TOP, (0, 2), 6)
    assert not some.is_uniform(4)
    assert not StepDecision(3, FixedLength(), draft_requests=(0,)).is_uniform(2)
    assert StepDecision(3, TopK(4)).for_some([1], 4).most_drafts(4) == 3
    assert StepDecision(3, FixedLength()).for_some(range(4), 4).is_uniform(4)
