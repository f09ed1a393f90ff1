"""A confidence head that is broken now and then: its drafts rank behind all others, and the plan has its rows."""

import pytest
import torch

from sglang_dspark.calibration.online import OnlineCalibration
from sglang_dspark.scheduling.forecast import Forecast
from sglang_dspark.step.selected import TopDrafts

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
