"""The drafts that a decision selects, within what single requests ask for."""

import pytest
import torch
from dspark_kernels import DraftBlock

from sglang_dspark.step.confidence import Confidence
from sglang_dspark.step.decision import StepDecision
from sglang_dspark.step.limits import RequestLimits
from sglang_dspark.step.selection import EarlyStop, FixedLength, Threshold, TopK
from sglang_dspark.step.state import DraftOutput

GAMMA = 3
SURVIVAL = torch.tensor([[0.9, 0.8, 0.7], [0.6, 0.5, 0.4], [0.3, 0.2, 0.1]])


def lens_within(decision, limits, survival=SURVIVAL):
    """Lengths of a step of three requests whose blocks have these survivals."""
    logits = torch.logit(torch.tensor([[0.9, 0.9, 0.9], [0.9, 0.4, 0.9], [0.3, 0.9, 0.9]]))
    block = DraftBlock(torch.zeros(3, GAMMA, dtype=torch.int64), None, logits)
    predicted = None if survival is None else Confidence(logits, survival)
    within = decision.within(limits)
    return within.select(DraftOutput(block, predicted, within.draft_lens(3))).verify_lens.tolist()


def test_a_capped_request_leaves_its_share_to_the_others():
    top = StepDecision(GAMMA, TopK(4))
    assert lens_within(top, RequestLimits((3, 3, 3))) == [3, 1, 0]
    assert lens_within(top, RequestLimits((1, 3, 3))) == [1, 3, 0]
    assert lens_within(top, RequestLimits((0, 1, 1))) == [0, 1, 1]
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
