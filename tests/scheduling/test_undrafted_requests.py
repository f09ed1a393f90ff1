"""A request that runs alone is not drafted while it is beyond the drafter."""

import numpy as np
import pytest
import torch
from made_schedule import GAMMA, confidence, schedule

from sglang_dspark.scheduling.forecast import UPDATE_STEPS
from sglang_dspark.step.decision import StepRecord

EASY, HARD = [0.9, 0.8, 0.7], [0.01, 0.0, 0.0]


def serve_alone(made, name, survival, steps, accepted=None):
    """Return the decisions of a request's steps, nothing else running; its likely drafts are accepted, or so many."""
    choices, accepted = [], sum(np.array(survival) > 0.5) if accepted is None else accepted
    for _ in range(steps):
        decision = made.choose([name], 64.0)
        made.invalidate()
        choices.append(decision)
        depth = decision.draft_len
        foretold = confidence(torch.zeros(1, depth), torch.tensor([survival[:depth]])) if depth else None
        lens = torch.tensor([depth])
        made.observe(StepRecord([name], decision, [depth], lens, foretold, None), [0], [min(accepted, depth)])
    return choices


@pytest.mark.parametrize("fixed_draft_shape", [False, True])
def test_a_lone_request_beyond_the_drafter_is_left_undrafted(fixed_draft_shape):
    """However good the drafts of those before it were; the next one is drafted from its first step on."""
    made = schedule(online_calibration=False)
    made.fixed_draft_shape = made.policy.fixed_draft_shape = fixed_draft_shape
    assert all(decision.draft_len for decision in serve_alone(made, "easy", EASY, 200))
    plain = [decision.draft_len == 0 for decision in serve_alone(made, "hard", HARD, 100)]
    assert not made.parked
    assert not any(plain[:4])
    assert sum(plain[2 * UPDATE_STEPS :]) > 75
    assert not all(plain[UPDATE_STEPS:])  # it is tried again
    assert made.choose(["next"], 64.0).draft_len > 0


def test_a_lone_request_that_gets_easier_is_drafted_again_though_its_head_is_blind():
    made = schedule(online_calibration=False)
    serve_alone(made, "easy", EASY, 100)
    serve_alone(made, "r", HARD, 50)
    assert made.choose(["r"], 64.0).draft_len == 0
    drafted = [decision.draft_len > 0 for decision in serve_alone(made, "r", HARD, 100, accepted=GAMMA)]
    assert not made.parked
    assert sum(drafted) > 30
