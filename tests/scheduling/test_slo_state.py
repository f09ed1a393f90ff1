"""Weights of requests: what an SLO makes of the clock, what weights do to a plan, and what they may depend on."""

import itertools

import numpy as np
import pytest
import torch
from dspark_kernels import DraftBlock
from step_tables import GAMMA, memory_bound

from sglang_dspark.config import DSparkConfig
from sglang_dspark.scheduling.schedule import SLO_HEAD_TOKENS, Schedule, SloState
from sglang_dspark.step.decision import StepDecision
from sglang_dspark.step.selection import EarlyStop, FixedLength, Threshold, TopK
from sglang_dspark.step.state import Confidence, DraftOutput

CPU = torch.device("cpu")


def lens_of(decision, survival):
    """Verify lengths of blocks with these survivals."""
    tokens = torch.zeros(survival.shape, dtype=torch.int64)
    draft = DraftOutput(DraftBlock(tokens), Confidence(None, survival), [survival.shape[1]] * len(survival))
    return decision.select(draft).verify_lens.tolist()


@pytest.mark.parametrize(
    ("taken", "counts"), [(0.1, 0.7), (0.8, 0.7), (0.875, 1.85), (0.95, 3), (1.5, 3), (1.65, 2), (1.8, 1), (50, 1)]
)
def test_a_request_counts_by_the_share_of_its_slo_that_it_has_taken(taken, counts):
    """Those that are nearly late count most, and those that are beyond help as much as any other."""
    state = SloState(10.0, 0.5)
    assert state.weight(990.0, 0) == 0.5  # its first token is not known
    assert state.weight(1000.0, 3) == 0.5 * 3  # on time
    assert state.weight(1040.0, 4) == 0.5 * 3  # far behind, but only just begun
    now, tokens = 1000 + (taken * (40 + SLO_HEAD_TOKENS) - SLO_HEAD_TOKENS) * 10, 43
    assert state.weight(now, tokens) == pytest.approx(0.5 * counts)
    assert state.late_ms(now, tokens) == pytest.approx((taken - 1) * (40 + SLO_HEAD_TOKENS) * 10)
    without = SloState(None, 0.5)
    assert (without.weight(now, tokens), without.late_ms(now, tokens)) == (0.5, 0.0)


def warm_schedule():
    made = Schedule(DSparkConfig(), GAMMA, None, CPU)
    made.start(memory_bound())
    made.forecast.lagged.observe(np.random.default_rng(0).beta(5, 1, size=(256, GAMMA)).cumprod(1))
    return made


def test_equal_weights_leave_every_decision_as_it_is():
    requests = [f"r{place}" for place in range(48)]
    weighed, plain = warm_schedule(), warm_schedule()
    for step in range(100):
        weights = None if step % 3 == 0 else [0.25 + step] * len(requests)
        assert weighed.choose(requests, 64.0, weights=weights) == plain.choose(requests, 64.0)


def test_only_rules_that_rank_are_weighed():
    assert StepDecision(1, TopK(1)).weighted((0.2, 0.4)).selection.weights == (0.5, 1.0)
    for rule in (FixedLength(), EarlyStop((1.0, 2.0)), Threshold(0.5)):
        assert StepDecision(1, rule).weighted((1.0, 0.5)).selection is rule


def test_more_weight_never_means_fewer_drafts():
    rng = np.random.default_rng(0)
    for _ in range(200):
        survival = torch.tensor(rng.random((5, 3)).cumprod(1), dtype=torch.float32)
        weights, budget = rng.uniform(0.05, 1, 5), int(rng.integers(1, 15))
        decision = StepDecision(3, TopK(budget))
        before = lens_of(decision.weighted(weights), survival)
        weights[2] *= 1.5
        after = lens_of(decision.weighted(weights), survival)
        assert after[2] >= before[2] and sum(after) == sum(before) == budget
    # The least key there is: prefixes hold, and nobody who may verify drafts is left out of a whole budget.
    assert lens_of(StepDecision(3, TopK(15)).weighted([1e-4, 1, 1, 1, 1]), survival) == [3] * 5


TARGET, DRAFT = (0.7, 0.3), (0.5, 0.5)


def distribution(weights_of):
    """Return the distribution of the first of two requests' next tokens, of which one draft is verified.

    A rejected draft is drawn again from what is left of the target; a token without a draft from the target.

    Args:
        weights_of: by the clock, and by the drafts of this step, which no rule may know.
    """
    found = [0.0, 0.0]
    for clock, drafts in itertools.product(range(4), itertools.product(range(2), repeat=2)):
        chance = 0.25 * DRAFT[drafts[0]] * DRAFT[drafts[1]]
        decision = StepDecision(1, TopK(1)).weighted(weights_of(clock, drafts))
        if lens_of(decision, torch.tensor([[0.8], [0.8]]))[0] == 0:
            found = [have + chance * p for have, p in zip(found, TARGET, strict=True)]
            continue
        kept = min(1.0, TARGET[drafts[0]] / DRAFT[drafts[0]])
        found[drafts[0]] += chance * kept
        found[0] += chance * (1 - kept)  # of this target and drafter, all of what is left
    return found


def test_weights_by_the_clock_keep_the_distribution_and_weights_by_a_draft_do_not():
    def by_the_clock(clock, drafts):
        return [SloState(1.0, began_ms=0.0).weight(7.0 + place * clock, 8) for place in (0, 1)]

    assert {tuple(by_the_clock(clock, ())) for clock in range(4)} != {(1.0, 1.0)}
    assert distribution(by_the_clock) == pytest.approx(TARGET, abs=1e-12)
    assert abs(distribution(lambda clock, drafts: (1.0 if drafts[0] == 0 else 0.3, 0.9))[0] - 0.7) > 0.02
