"""A drafter is judged by its first drafts."""

import math

import pytest
import torch
from dspark_kernels import ASKED_ROWS

from sglang_dspark.calibration.fit import MOST
from sglang_dspark.features.reports.first_drafts import FirstDrafts
from sglang_dspark.step.confidence import Confidence
from sglang_dspark.step.decision import StepDecision
from sglang_dspark.step.record import StepRecord
from sglang_dspark.step.selection import FixedLength


def record(verified, *, copied=None, logits=None):
    requests = [f"r{index}" for index in range(len(verified))]
    decision = StepDecision(3, FixedLength(), with_confidence=logits is not None)
    confidence = None if logits is None else Confidence(torch.tensor(logits), torch.zeros(len(verified), 3))
    lens = torch.tensor(verified)
    chains = torch.tensor([[ASKED_ROWS + 1, lead, 7, 7, 7] for lead in copied or [0] * len(verified)])
    return StepRecord(requests, decision, [3] * len(verified), lens, confidence, None, chains)


def test_only_verified_drafts_of_the_drafter_count():
    drafts = FirstDrafts()
    # The second request has ended, the third was not verified, the fourth had copied drafts.
    drafts.count(record([3, 3, 0, 3, 1], copied=[0, 0, 0, 3, 0]), [0, 2, 3, 4], [2, 0, 3, 0])
    assert (drafts.fit.first_drafts, drafts.fit.accepted, drafts.fit.promised) == (2, 1, None)


def test_the_promise_is_that_of_the_raw_head_on_the_same_drafts():
    drafts = FirstDrafts()
    logits = [[0.0, 9.0, 9.0], [math.log(3), 9.0, 9.0], [-9.0, 9.0, 9.0], [math.nan, 9.0, 9.0]]
    drafts.count(record([1, 1, 0, 1], logits=logits), [0, 1, 2, 3], [0, 1, 0, 0])
    assert drafts.fit.promised == pytest.approx((0.5 + 0.75 + 0.0) / 3)
    assert (drafts.fit.first_drafts, drafts.fit.accepted) == (3, 1)


def test_the_verdict_on_the_first_drafts_stays():
    drafts = FirstDrafts()
    for _ in range(MOST // 64):
        drafts.count(record([1] * 64), list(range(64)), [1] * 64)
    fit = drafts.fit
    drafts.count(record([1] * 64), list(range(64)), [0] * 64)
    assert drafts.fit == fit


@pytest.mark.parametrize(("accepted", "warnings"), [(2, 1), (50, 0)])
def test_a_drafter_that_does_not_fit_is_named_in_the_log_once(caplog, accepted, warnings):
    drafts = FirstDrafts()
    for _ in range(3):
        drafts.count(record([1] * 64), list(range(64)), [1] * accepted + [0] * (64 - accepted))
    assert sum("hardly predicts this target" in record.message for record in caplog.records) == warnings
