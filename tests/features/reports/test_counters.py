"""Counters of decode steps, and the figures that follow from their sums."""

import numpy as np
import pytest

from sglang_dspark.features.reports.counters import Counters, load_of, requests_of
from sglang_dspark.scheduling.online_calibration import PredictedSurvival
from sglang_dspark.step.decision import TimedStep


def record(counters, draft_lens, verify_lens, accept_lens, policy="auto", **fields):
    nothing = [0] * len(draft_lens)
    leading = [fields.pop(kind, nothing) for kind in ("copied", "followed", "cached")]
    counters.record(draft_lens, verify_lens, accept_lens, leading, policy=policy, **fields)


def test_nothing_counted_is_no_figure():
    report = Counters(gamma=2).sums().report()
    assert report["steps"] == report["committed_tokens"] == 0
    assert report["accept_length"] is report["wasted_verify_fraction"] is report["measured_step_ms"] is None
    assert report["survival"] == report["predicted_survival"] == [None, None]
    assert report["by_load"] == []


def test_figures():
    counters = Counters(gamma=3)
    record(counters, [3, 3], verify_lens=[3, 3], accept_lens=[3, 1])
    record(counters, [3, 3], verify_lens=[2, 0], accept_lens=[0, 0], policy="static")
    record(counters, [0], verify_lens=[0], accept_lens=[0], parked=True)
    counters.record_time(TimedStep(2, 10.0, 12.0))
    counters.record_time(TimedStep(2, 20.0, 14.0))
    report = counters.sums().report()
    by_load = report.pop("by_load")
    assert report == {
        "steps": 3,
        "plain_steps": 1,
        "parked_steps": 1,
        "rounds": 5,
        "drafted_tokens": 12,
        "copied_tokens": 0,
        "copied_accepted_tokens": 0,
        "text_proposed_tokens": 0,
        "text_verified_tokens": 0,
        "text_accepted_tokens": 0,
        "cache_proposed_tokens": 0,
        "cache_verified_tokens": 0,
        "cache_accepted_tokens": 0,
        "thinking_rounds": 0,
        "verified_tokens": 8,
        "accepted_tokens": 4,
        "committed_tokens": 9,
        "unproposed_tokens": 0,
        "timed_steps": 2,
        "accept_length": 9 / 5,
        "thinking_accept_length": None,
        "answer_accept_length": 9 / 5,
        "verify_length": 8 / 5,
        "wasted_verify_fraction": 1 / 2,
        "running_requests": 5 / 3,
        "measured_step_ms": 15.0,
        "predicted_step_ms": 13.0,
        # position 0 was verified three times and kept twice; position 2 verified twice and kept once
        "survival": [2 / 3, 1 / 3, 1 / 2],
        # position 1 was put to the test twice: a predecessor was rejected in the third round that verified it
        "conditional_acceptance": [2 / 3, 1 / 2, 1.0],
        "predicted_survival": [None] * 3,
        "calibration_error": [None] * 3,
    }
    assert [(load["requests"], load["rounds"]) for load in by_load] == [([1, 1], 1), ([2, 2], 4)]
    assert by_load[1]["verify_length"] == 2.0
    assert counters.steps_by_policy == {"auto": 2, "static": 1}


def test_figures_by_position_equal_a_count_draft_by_draft():
    rng = np.random.default_rng(1)
    counters = Counters(gamma=4)
    rounds = [(v, int(rng.integers(0, v + 1))) for v in rng.integers(0, 5, size=300).tolist()]
    for verified, accepted in rounds:
        record(counters, [4], [verified], [accepted])
    report = counters.sums().report()
    for position in range(4):
        reached = [(v, a) for v, a in rounds if v > position]
        kept = sum(a > position for _, a in reached)
        assert report["survival"][position] == kept / len(reached)
        assert report["conditional_acceptance"][position] == kept / sum(a >= position for _, a in reached)


@pytest.mark.parametrize(("requests", "load"), [(1, 0), (2, 1), (3, 2), (4, 2), (5, 3), (64, 6), (65, 7)])
def test_loads_double(requests, load):
    assert load_of(requests) == load
    fewest, most = requests_of(load)
    assert fewest <= requests <= most


def test_predicted_survivals_are_compared_on_the_drafts_that_were_verified():
    predicted = PredictedSurvival(2)
    counters = Counters(gamma=3, predicted=predicted)
    # Of the second round, the second draft was not verified, and of the third, none; nan: not drafted.
    survival = np.array([[0.9, 0.5], [0.7, 0.6], [np.nan, np.nan]])
    predicted.observe(survival, np.array([2, 1, 0]), np.array([1, 1, 0]))
    report = counters.sums().report()
    assert report["predicted_survival"] == [pytest.approx(0.8), 0.5, None]
    assert report["calibration_error"] == [pytest.approx(0.8 - 1.0), 0.5, None]


def test_drafts_from_the_text_are_counted_among_the_others():
    counters = Counters(3)
    record(counters, [3, 3, 3], [3, 2, 0], [1, 2, 0], followed=[2, 3, 1], cached=[3, 0, 0])
    report, kinds = counters.sums().report(), ("proposed", "verified", "accepted")
    assert [report[f"text_{kind}_tokens"] for kind in kinds] == [6, 4, 3]
    assert [report[f"cache_{kind}_tokens"] for kind in kinds] == [3, 3, 1]
    assert (report["drafted_tokens"], report["verified_tokens"], report["accepted_tokens"]) == (9, 5, 3)


def test_copied_drafts_say_nothing_about_the_drafter():
    counters = Counters(gamma=3)
    record(counters, [1, 3], verify_lens=[2, 3], accept_lens=[2, 0], copied=[1, 0])
    record(counters, [0], verify_lens=[3], accept_lens=[3], copied=[3])
    report = counters.sums().report()
    assert (report["plain_steps"], report["rounds"]) == (0, 3)
    assert (report["drafted_tokens"], report["verified_tokens"]) == (4, 8)
    assert (report["copied_tokens"], report["copied_accepted_tokens"], report["accepted_tokens"]) == (4, 4, 5)
    assert report["survival"] == [0, 0, 0]


def test_thoughts_and_answers_have_accept_lengths_of_their_own():
    counters = Counters(gamma=3)
    record(counters, [3, 3, 0], [3, 2, 3], [2, 0, 3], copied=[0, 0, 3], thoughts=[2, 3])
    record(counters, [0, 0], verify_lens=[0, 0], accept_lens=[0, 0], thoughts=[0])
    report = counters.sums().report()
    assert report["thinking_rounds"] == 3
    assert (report["thinking_accept_length"], report["answer_accept_length"]) == (8 / 3, 1.0)
