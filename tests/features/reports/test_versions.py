"""Accept length by version of the weights, and drafters that are judged by their first drafts."""

import math

import pytest
import torch
from dspark_kernels import ASKED_ROWS

from sglang_dspark.features.reports.counters import MOST, FirstDrafts, Versions, fit_of, report
from sglang_dspark.scheduling.online_calibration import MOST as MOST_DRAFTS
from sglang_dspark.step.decision import StepDecision, StepRecord
from sglang_dspark.step.selection import FixedLength
from sglang_dspark.step.state import Confidence

STEP = StepRecord(["a", "b"], StepDecision(3, FixedLength()), [3, 3], torch.tensor([3, 3]), None, None)


def in_short(versions):
    return [(count["key"], count["rounds"], count["tokens"]) for count in versions.counts]


def test_rounds_count_for_the_version_in_force():
    """One that comes back goes on where it was; of many, the last ones are kept."""
    versions = Versions(("default", "a"))
    for key, accepted in ((None, 2), (("v1", "a"), 0), (("v1", "b"), 3), (("default", "a"), 1)):
        if key is not None:
            versions.change(key)
        versions.count(STEP, [1], [accepted])
    assert in_short(versions) == [(("v1", "a"), 1, 1), (("v1", "b"), 1, 4), (("default", "a"), 2, 5)]
    for number in range(2 * MOST):
        versions.change((str(number), "a"))
    assert [key for key, *_ in in_short(versions)] == [(str(number), "a") for number in range(MOST, 2 * MOST)]


def test_a_drafter_is_judged_anew_with_each_version():
    versions = Versions(("1", "a"))
    versions.first_drafts.counts |= {"verified": 80, "accepted": 0}
    versions.change(("2", "a"))
    versions.first_drafts.counts |= {"verified": 80, "accepted": 70}
    assert [one["drafter_fit"] for one in report([versions.counts])] == ["misfit", "fits"]
    versions.change(("2", "a"))  # under the same name
    assert [one["drafter_fit"] for one in report([versions.counts])] == ["misfit", "unknown"]


def test_versions_of_replicas_are_added_up():
    def counts(version, rounds, tokens, verified=0):
        first = FirstDrafts().counts | {"verified": verified}
        return {"key": [version, "a"], "rounds": rounds, "tokens": tokens, "first_drafts": first}

    found = report([[counts("v", 2, 5, 40)], [counts("v", 1, 1, 40), counts("w", 0, 0)]])
    assert found == [
        {"weight_version": "v", "drafter": "a", "rounds": 3, "accept_length": 2.0, "drafter_fit": "misfit"},
        {"weight_version": "w", "drafter": "a", "rounds": 0, "accept_length": None, "drafter_fit": "unknown"},
    ]


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
    fit = fit_of(drafts.counts)
    assert (fit.first_drafts, fit.accepted, fit.promised) == (2, 1, None)


def test_the_promise_is_that_of_the_raw_head_on_the_same_drafts():
    drafts = FirstDrafts()
    logits = [[0.0, 9.0, 9.0], [math.log(3), 9.0, 9.0], [-9.0, 9.0, 9.0], [math.nan, 9.0, 9.0]]
    drafts.count(record([1, 1, 0, 1], logits=logits), [0, 1, 2, 3], [0, 1, 0, 0])
    assert fit_of(drafts.counts).promised == pytest.approx((0.5 + 0.75 + 0.0) / 3)
    assert (fit_of(drafts.counts).first_drafts, fit_of(drafts.counts).accepted) == (3, 1)


def test_the_verdict_on_the_first_drafts_stays():
    drafts = FirstDrafts()
    for _ in range(MOST_DRAFTS // 64):
        drafts.count(record([1] * 64), list(range(64)), [1] * 64)
    fit = fit_of(drafts.counts)
    drafts.count(record([1] * 64), list(range(64)), [0] * 64)
    assert fit_of(drafts.counts) == fit


@pytest.mark.parametrize(("accepted", "warnings"), [(2, 1), (50, 0)])
def test_a_drafter_that_does_not_fit_is_named_in_the_log_once(caplog, accepted, warnings):
    drafts = FirstDrafts()
    for _ in range(3):
        drafts.count(record([1] * 64), list(range(64)), [1] * accepted + [0] * (64 - accepted))
    assert sum("hardly predicts this target" in record.message for record in caplog.records) == warnings
