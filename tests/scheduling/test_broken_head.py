"""A confidence head that is broken now and then: its drafts rank behind all others, and the plan has its rows."""

import pytest
import torch

from sglang_dspark.calibration.online import OnlineCalibration
from sglang_dspark.scheduling.forecast import Forecast
from sglang_dspark.scheduling.lagged_survival import WINDOW_ROUNDS, LaggedSurvivals
from sglang_dspark.scheduling.step_feedback import StepFeedback
from sglang_dspark.step.decision import StepDecision
from sglang_dspark.step.record import StepRecord
from sglang_dspark.step.selected import TopDrafts
from sglang_dspark.step.selection import FixedLength

GAMMA = 3


@pytest.fixture
def forecast():
    return Forecast(GAMMA, OnlineCalibration(GAMMA), adapts=True, device=torch.device("cpu"))


def test_a_draft_without_a_confidence_is_not_expected_to_survive(forecast):
    logits = torch.tensor([[0.0, torch.nan, 5.0], [torch.nan, 5.0, 5.0]])
    assert forecast.survival(logits, 2, GAMMA).tolist() == [[0.5, 0.0, 0.0], [0.0, 0.0, 0.0]]


@pytest.mark.parametrize("budget", range(2 * GAMMA + 1))
def test_as_many_drafts_are_verified_as_the_step_has_rows_for(forecast, budget):
    logits = torch.tensor([[0.0, torch.nan, 5.0], [torch.nan, 5.0, 5.0]])
    best = TopDrafts(forecast.survival(logits, 2, GAMMA), budget)
    assert int(best.verify_lens.sum()) == budget


def test_a_draft_without_a_confidence_is_not_believed_later_either(forecast, monkeypatch):
    """Whenever the calibration is fitted again, the rounds that budgets are based on are predicted again."""
    forecast.lagged = LaggedSurvivals(GAMMA, (GAMMA,))
    sizes, revise = [], forecast.lagged.revise
    monkeypatch.setattr(forecast.lagged, "revise", lambda rounds: (sizes.append(len(rounds)), revise(rounds)))
    logits, lens = torch.tensor([[0.0, torch.nan, 5.0], [torch.nan, 5.0, 5.0], [5.0, 5.0, 5.0]]), torch.full((3,), 3)
    decision = StepDecision(GAMMA, FixedLength())
    for _ in range(WINDOW_ROUNDS):
        confidence = forecast.predict(logits, 3, GAMMA)
        record = StepRecord(["a", "b", "c"], decision, [GAMMA] * 3, lens, confidence, None)
        forecast.observe(StepFeedback(record, [0, 1, 2], [3, 3, 3]))
    assert forecast.calibration.num_refits == len(sizes) > 1
    assert sizes[-1] == WINDOW_ROUNDS
    assert (forecast.lagged.mean() > 0.3).all()
    assert (forecast.lagged.mean() < [0.7, 0.35, 0.35]).all()
