"""Tests of the policy ``auto``: when it speculates, parks, resumes, probes and explores.

A budget bounds what speculation may lose on a request that runs alone.
"""

import math
from dataclasses import replace

import numpy as np
import pytest
from step_tables import GAMMA, compute_bound, costly_drafts, make_table, memory_bound

from sglang_dspark.scheduling.auto_policy import (
    BUDGET_MOST,
    BUDGET_PER_STEP,
    BUDGET_START,
    MARGIN,
    MIN_ROUNDS,
    PARKED_PROBE_WEIGHT,
    PROBE_STEPS,
    AutoPolicy,
    SingleRequestBudget,
    draft_depths,
)
from sglang_dspark.scheduling.forecast import UPDATE_STEPS, WINDOW_ROUNDS, LaggedSurvivals
from sglang_dspark.scheduling.policies import EarlyStopPolicy, FixedPolicy, ThresholdPolicy
from sglang_dspark.scheduling.step_times import StepKind, StepTimes
from sglang_dspark.step.decision import PLAIN, StepDecision
from sglang_dspark.step.selection import FixedLength, Threshold, TopK

CONTEXT = 300.0
GOOD, BAD = 0.9, 0.3  # conditional acceptance


def make_policy(table, confidence=None, depths=(GAMMA,)):
    policy = AutoPolicy(StepTimes(table), LaggedSurvivals(GAMMA, depths))
    if confidence is not None:
        tell(policy, confidence)
    return policy


def tell(policy, confidence, rounds=WINDOW_ROUNDS):
    policy.survivals.observe(np.tile(confidence ** np.arange(1.0, GAMMA + 1), (rounds, 1)))


def tokens(confidence, drafts=GAMMA):
    """Expected per request and step."""
    return float((confidence ** np.arange(drafts + 1.0)).sum())


def break_even(confidence, advantage=0.0):
    """Cost of drafting at which whole blocks are worth plain decoding, ``advantage`` (in logarithms) apart."""
    return costly_drafts(10 * (tokens(confidence) * math.exp(-advantage) - 1))


def run(policy, steps, requests=4):
    return [policy.choose(requests, CONTEXT) for _ in range(steps)]


def untried(policy, steps, requests=4):
    """Choices that do not serve to learn something."""
    made = [(policy.choose(requests, CONTEXT), policy.probing) for _ in range(steps)]
    return [decision for decision, probing in made if not probing]


def sides(policy, steps):
    """Return whether the server is parked, step by step."""
    return [policy.parked for _ in range(steps) if policy.choose(4, CONTEXT)]


def whole(requests):
    return StepDecision(GAMMA, TopK(GAMMA * requests))


@pytest.mark.parametrize("requests", [1, 4, 12])
def test_the_first_step_is_the_whole_block(requests):
    """Also where the guess about an unknown drafter says that it does not pay."""
    for table in (memory_bound(), break_even(0.7, advantage=-0.5)):
        assert make_policy(table).choose(requests, CONTEXT) == whole(requests)


def test_it_trims_where_tokens_cost():
    policy = make_policy(compute_bound(), 0.7, depths=draft_depths(compute_bound().draft_ms))
    decision = policy.choose(32, CONTEXT)
    assert 0 < decision.max_drafts(0) < 32 * GAMMA
    assert decision.draft_len < GAMMA
    assert decision.max_drafts(0) <= 32 * decision.draft_len


def test_it_does_not_park_before_it_has_seen_the_drafter():
    policy = make_policy(break_even(BAD, advantage=-1.0))
    tell(policy, BAD, MIN_ROUNDS - 1)
    assert PLAIN not in untried(policy, 10)
    tell(policy, BAD, 1)
    assert sides(policy, 1) == [True]


def test_it_resumes_when_drafts_get_better():
    policy = make_policy(break_even(0.6), BAD)
    run(policy, 10)
    assert policy.parked
    tell(policy, GOOD)
    assert whole(4) in run(policy, UPDATE_STEPS)


@pytest.mark.parametrize(("advantage", "resumes"), [(0.5 * MARGIN, False), (1.5 * MARGIN, True)])
def test_a_resumption_has_to_be_worth_something(advantage, resumes):
    policy = make_policy(break_even(BAD, advantage), BAD)
    policy.parked = True
    policy.choose(4, CONTEXT)
    assert policy.parked != resumes


def at_probes(choices, best):
    """Steps at which something else was done, and what."""
    steps = [step for step, decision in enumerate(choices) if decision != best]
    return steps, [choices[step] for step in steps]


def test_a_parked_server_probes_one_request_after_the_other():
    policy = make_policy(break_even(BAD, advantage=-0.8), BAD)
    _, probes = at_probes(run(policy, 4000, requests=3), PLAIN)
    assert probes[0] == StepDecision(
        GAMMA, TopK(GAMMA, probe_request=1), draft_requests=(1,), weight=PARKED_PROBE_WEIGHT
    )
    assert [probe.draft_requests for probe in probes[:6]] == [(r,) for r in (1, 2, 0, 1, 2, 0)]
    assert {replace(probe, selection=TopK(GAMMA, probe.selection.probe_request)) for probe in probes} == set(probes)
    assert {replace(probe, selection=TopK(0), draft_requests=None) for probe in probes} == {
        replace(probes[0], selection=TopK(0), draft_requests=None)
    }


def test_a_probe_of_graphs_shows_all_requests():
    """They are drafted together in any case; one of them is verified."""
    policy = make_policy(break_even(BAD, advantage=-0.8), BAD)
    policy.fixed_draft_shape = True
    _, probes = at_probes(run(policy, 4000, requests=3), PLAIN)
    assert probes[0] == StepDecision(GAMMA, TopK(GAMMA, probe_request=1), weight=PARKED_PROBE_WEIGHT)


@pytest.mark.parametrize(
    ("table", "confidence", "usual", "weight"),
    [(break_even(BAD, advantage=-0.8), BAD, 0, PARKED_PROBE_WEIGHT), (compute_bound(), GOOD, 3, 1)],
    ids=["parked", "speculating"],
)
def test_where_all_verify_as_many_drafts_a_probe_is_a_whole_step(table, confidence, usual, weight):
    """And every other choice is a non-speculative step, or one length of the given ones for all."""
    policy = make_policy(table, confidence, depths=(1, 3, GAMMA))
    policy.fixed_draft_shape = policy.uniform = True
    made = [(policy.choose(32, CONTEXT), policy.probing) for _ in range(4000)]
    assert all(decision.is_fixed(32) for decision, _ in made)
    assert {decision.draft_len for decision, probing in made if not probing} == {usual}
    probes = {decision for decision, probing in made if probing and decision.draft_len == GAMMA}
    assert probes == {replace(whole(32), weight=weight)}


def test_probes_of_a_parked_server_get_rarer_the_more_they_cost():
    def steps_between(extra_ms):
        policy = make_policy(costly_drafts(extra_ms), BAD)
        choices = run(policy, 6000, requests=1)
        probes = [step for step, decision in enumerate(choices) if decision.selection.probe_request is not None]
        assert {choices[step].draft_requests for step in probes} == {None}  # a lone request's step is a whole batch's
        return np.diff(probes)

    for extra_ms in (10 * (tokens(BAD) - 1) * 1.05, 15.0, 30.0, 60.0):
        between = steps_between(extra_ms)
        # Drafting for one costs extra_ms / 10 non-speculative steps. An exploration may come first, which costs less.
        expected = math.ceil(max(PROBE_STEPS, extra_ms / 10 / MARGIN))
        assert expected <= min(between) <= max(between) <= 2 * expected


def test_probes_are_rarer_where_drafting_for_one_drafts_for_all():
    """Drafting takes 1 ms per request, a non-speculative step 10."""
    table = make_table(lambda r, d, c: 10 + 0 * r, lambda r, d, c: 1.0 * r)

    def steps_between(fixed_draft_shape):
        policy = make_policy(table, confidence=0.05)
        policy.fixed_draft_shape = fixed_draft_shape
        policy.parked = True
        steps, _ = at_probes(run(policy, 4000, requests=16), PLAIN)
        return set(np.diff(steps))

    assert steps_between(False) == {PROBE_STEPS}
    assert steps_between(True) == {math.ceil(1.6 / MARGIN) + 1}  # the step before found nothing to explore


def run_and_time(policy, steps, truth, requests=4):
    """Whole-batch steps take ``truth(decision)`` times what the table says."""
    for _ in range(steps):
        decision = policy.choose(requests, CONTEXT)
        if decision.draft_requests is None:
            kind = StepKind(requests, requests + decision.max_drafts(0), decision.draft_len, CONTEXT)
            ms = policy.times.table.step_ms(requests, kind.num_tokens, kind.depth, CONTEXT)
            policy.times.observe(kind, truth(decision) * ms)
        yield decision


def test_a_step_that_the_table_may_be_wrong_about_is_timed():
    """Parked by a table that takes the drafter for slower than it is: the truth is found, and speculation goes on."""
    policy = make_policy(break_even(BAD, advantage=-0.25), BAD)
    choices = run_and_time(policy, 3000, lambda decision: 0.6 if decision.draft_len else 1.0)
    parked = [decision for decision in choices if policy.parked]
    assert PLAIN in parked
    assert not policy.parked
    assert len(parked) < 2000
    assert 1 <= sum(decision.draft_len > 0 and decision.draft_requests is None for decision in parked) <= 12


def test_the_plain_step_is_timed_while_speculating():
    """The table has non-speculative steps slower than they are, so speculation seems to pay. It does not."""
    policy = make_policy(break_even(GOOD, advantage=0.2), GOOD)
    choices = list(run_and_time(policy, 1500, lambda decision: 1.0 if decision.draft_len else 0.7))
    assert choices[0] == whole(4)
    assert policy.parked


def test_a_step_that_is_known_well_and_slower_is_left_alone():
    policy = make_policy(break_even(GOOD, advantage=0.2), GOOD)
    choices = list(run_and_time(policy, 8000, lambda decision: 1.0))
    assert 0 < choices[:4000].count(PLAIN) < 12
    assert choices[4000:].count(PLAIN) < 6


def trimming_policy(confidence=0.6):
    """Verifies a few drafts per request, by a wide margin."""
    table = make_table(
        lambda r, d, c: 10 + np.maximum(r * (1 + d) - 16, 0) * 4.0, lambda r, d, c: 1 + 0 * r, requests=[1, 2, 4, 8, 16]
    )
    return make_policy(table, confidence)


def test_a_trimmed_server_verifies_one_request_in_full_now_and_then():
    policy = trimming_policy()
    best = policy.choose(4, CONTEXT)
    assert best == StepDecision(GAMMA, TopK(12))
    steps, probes = at_probes(run(policy, 2500), best)
    forced = [probe for probe in probes if probe.selection.probe_request is not None]
    assert {replace(probe, selection=TopK(probe.selection.budget)) for probe in forced} == {
        StepDecision(GAMMA, TopK(12 + GAMMA))
    }
    assert [probe.selection.probe_request for probe in forced[:8]] == [1, 2, 3, 0, 1, 2, 3, 0]
    full = [step for step, probe in zip(steps, probes, strict=True) if probe.selection.probe_request is not None]
    assert min(np.diff(full)) >= PROBE_STEPS


def test_a_full_probe_does_not_ask_for_more_drafts_than_there_are():
    policy = make_policy(compute_bound(), 0.6, depths=tuple(range(1, GAMMA + 1)))
    for requests in (1, 2, 3):
        choices = run(policy, 800, requests)
        assert all(decision.max_drafts(0) <= requests * decision.draft_len for decision in choices)
        forced = {
            decision.selection.probe_request for decision in choices if decision.selection.probe_request is not None
        }
        assert forced == set(range(requests))


def test_equal_knowledge_gives_equal_choices():
    def choices():
        policy, rng = make_policy(compute_bound(), depths=tuple(range(1, GAMMA + 1))), np.random.default_rng(0)
        for _ in range(600):
            requests = int(rng.choice([1, 2, 5, 30]))
            decision = policy.choose(requests, CONTEXT)
            yield decision
            policy.survivals.observe(rng.beta(4, 1, size=(requests, GAMMA)).cumprod(1))
            if decision.draft_requests is None:
                kind = StepKind(requests, requests + decision.max_drafts(0), decision.draft_len, CONTEXT)
                policy.times.observe(kind, float(rng.uniform(10, 50)))

    first = list(choices())
    assert first == list(choices())
    assert len(set(first)) > 20


@pytest.mark.parametrize("requests", [1, 3, 8, 20])
def test_with_tiers_a_step_fills_one(requests):
    """Probes aside, which take what they need."""
    tiers = (8, 16, 24, 32, 48, 64, 96, 128, 160)
    policy = make_policy(compute_bound(tiers=tiers), 0.7)
    for decision in run(policy, PROBE_STEPS - 1, requests):
        if decision.draft_len:
            assert requests + decision.max_drafts(0) in tiers or decision.max_drafts(0) == requests * GAMMA


def test_the_report_is_about_the_last_choice():
    policy = make_policy(costly_drafts(1.0), GOOD)
    assert policy.report()["expected_tokens_per_s"] is None
    policy.choose(4, CONTEXT)
    report = policy.report()
    assert report["expected_tokens_per_s"] == pytest.approx(4 * tokens(GOOD) / 11 * 1000, rel=1e-5)
    assert report["lagged_survival"] == pytest.approx([GOOD**n for n in range(1, GAMMA + 1)])
    assert (report["parked"], report["probes"]) == (False, 0)


def test_depths_are_told_apart_where_shallow_blocks_are_cheaper():
    assert draft_depths(compute_bound().draft_ms) == tuple(range(1, GAMMA + 1))
    assert draft_depths(memory_bound().draft_ms) == (GAMMA,)
    rng = np.random.default_rng(0)
    noisy = memory_bound().draft_ms * rng.normal(1, 0.03, size=memory_bound().draft_ms.shape)
    assert draft_depths(noisy) == (GAMMA,)  # single cells are cheaper by chance
    assert draft_depths(make_table(lambda r, d, c: 1 + r, lambda r, d, c: 1 + r, gamma=1).draft_ms) == (1,)


def test_fixed_policies():
    assert FixedPolicy(3).choose(5, CONTEXT) == StepDecision(3, FixedLength())
    assert FixedPolicy(0, "off").choose(5, CONTEXT) == PLAIN
    assert FixedPolicy(3).report() == {"verify_len": 3}


def test_live_policies_draft_whole_blocks():
    policy = ThresholdPolicy(5, 0.4)
    assert (policy.name, policy.choose(9, CONTEXT)) == ("threshold", StepDecision(5, Threshold(0.4)))
    assert policy.report() == {"confidence_threshold": 0.4}
    times = StepTimes(memory_bound())
    decision = EarlyStopPolicy(GAMMA, times).choose(2, CONTEXT)
    assert decision.draft_len == GAMMA
    assert decision.selection.step_ms == tuple(times.by_drafts(2, GAMMA, CONTEXT))


def useless_steps(budget, cost, *, steps, request="r", pays=True):
    """Return at which of the next steps drafts are made; none is accepted."""
    return [step for step in range(steps) if budget.can_spend(request, cost, pays=pays)]


@pytest.mark.parametrize("seed", range(4))
def test_no_request_loses_more_than_its_stake_and_the_rate(seed):
    """Whatever its steps cost and bring, and however late that is known."""
    rng, budget = np.random.default_rng(seed), SingleRequestBudget()
    gained, behind = 0.0, [0, 0]
    for step in range(1, 2000):
        cost, luck = rng.uniform(0, BUDGET_START), rng.choice([0.0, 0.1, 0.5])
        if drafts := budget.can_spend("r", cost, pays=True):
            gained -= cost
        behind.append(int(drafts and rng.random() < luck))
        gained += behind[-1]
        budget.earn("r", behind.pop(0))
        assert gained >= -BUDGET_START - BUDGET_PER_STEP * step
    assert gained < 100, "such drafts do not pay"


def test_a_hard_text_is_given_up_after_the_stake_and_tried_again_at_the_rate():
    drafted = useless_steps(SingleRequestBudget(), 0.5, steps=100)
    assert drafted[:4] == [0, 1, 2, 3]
    assert set(np.diff(drafted[4:])) == {0.5 / BUDGET_PER_STEP}


def test_what_was_gained_is_kept_up_to_a_limit():
    budget = SingleRequestBudget()
    for _ in range(50):
        assert budget.can_spend("r", 0.5, pays=True)
        budget.earn("r", 3)
    assert len(useless_steps(budget, 0.5, steps=15)) == BUDGET_MOST / 0.5
    budget.earn("another", 3)
    assert useless_steps(budget, 0.5, steps=8) == []


@pytest.mark.parametrize(("pays", "trials"), [(True, 4), (False, 0)])
def test_the_next_request_has_a_stake_if_drafts_are_expected_to_pay(pays, trials):
    budget = SingleRequestBudget()
    useless_steps(budget, 0.5, steps=10)
    assert len(useless_steps(budget, 0.5, steps=8, request="next", pays=pays)) == trials


def test_no_request_inherits_more_than_a_stake():
    budget = SingleRequestBudget()
    budget.can_spend("r", 0.0, pays=True)
    budget.earn("r", 9)
    assert len(useless_steps(budget, 0.5, steps=20, request="next", pays=False)) == BUDGET_START / 0.5


def test_a_step_is_tried_whatever_the_table_says_it_costs():
    assert useless_steps(SingleRequestBudget(), 10 * BUDGET_START, steps=50) == [0]
