"""Tests of counters of decode steps, and of figures that follow from their sums, by version of the weights.

Drafters that do not fit are named after a few rounds. The golden one predicts as well whatever it taps, so wrong taps
cannot be shown with it.
"""

import math

import numpy as np
import pytest
import torch
from dspark_kernels import ASKED_ROWS
from golden_replay import load_golden
from stage_loop import DRAFT, StageLoop, golden_network

from sglang_dspark.features.reports.counters import (
    MOST_VERSIONS,
    Counters,
    Versions,
    fit_of,
    load_of,
    report_versions,
    requests_of,
)
from sglang_dspark.features.reports.counters import fit_of as judged
from sglang_dspark.scheduling.online_calibration import FIT_MOST, FitVerdict, PredictedSurvival
from sglang_dspark.step.decision import StepDecision, StepRecord, TimedStep
from sglang_dspark.step.selection import FixedLength
from sglang_dspark.step.state import Confidence


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
    for number in range(2 * MOST_VERSIONS):
        versions.change((str(number), "a"))
    assert [key for key, *_ in in_short(versions)] == [
        (str(number), "a") for number in range(MOST_VERSIONS, 2 * MOST_VERSIONS)
    ]


def test_a_drafter_is_judged_anew_with_each_version():
    versions = Versions(("1", "a"))
    versions.first_drafts |= {"verified": 80, "accepted": 0}
    versions.change(("2", "a"))
    versions.first_drafts |= {"verified": 80, "accepted": 70}
    assert [one["drafter_fit"] for one in report_versions([versions.counts])] == ["misfit", "fits"]
    versions.change(("2", "a"))  # under the same name
    assert [one["drafter_fit"] for one in report_versions([versions.counts])] == ["misfit", "unknown"]


def test_versions_of_replicas_are_added_up():
    def counts(version, rounds, tokens, verified=0):
        first = Versions(("default", "a")).first_drafts | {"verified": verified}
        return {"key": [version, "a"], "rounds": rounds, "tokens": tokens, "first_drafts": first}

    found = report_versions([[counts("v", 2, 5, 40)], [counts("v", 1, 1, 40), counts("w", 0, 0)]])
    assert found == [
        {"weight_version": "v", "drafter": "a", "rounds": 3, "accept_length": 2.0, "drafter_fit": "misfit"},
        {"weight_version": "w", "drafter": "a", "rounds": 0, "accept_length": None, "drafter_fit": "unknown"},
    ]


def version_record(verified, *, copied=None, logits=None):
    requests = [f"r{index}" for index in range(len(verified))]
    decision = StepDecision(3, FixedLength(), with_confidence=logits is not None)
    confidence = None if logits is None else Confidence(torch.tensor(logits), torch.zeros(len(verified), 3))
    lens = torch.tensor(verified)
    chains = torch.tensor([[ASKED_ROWS + 1, lead, 7, 7, 7] for lead in copied or [0] * len(verified)])
    return StepRecord(requests, decision, [3] * len(verified), lens, confidence, None, chains)


def test_only_verified_drafts_of_the_drafter_count():
    drafts = Versions(("default", "a"))
    # The second request has ended, the third was not verified, the fourth had copied drafts.
    drafts.count(version_record([3, 3, 0, 3, 1], copied=[0, 0, 0, 3, 0]), [0, 2, 3, 4], [2, 0, 3, 0])
    fit = fit_of(drafts.first_drafts)
    assert (fit.first_drafts, fit.accepted, fit.promised) == (2, 1, None)


def test_the_promise_is_that_of_the_raw_head_on_the_same_drafts():
    drafts = Versions(("default", "a"))
    logits = [[0.0, 9.0, 9.0], [math.log(3), 9.0, 9.0], [-9.0, 9.0, 9.0], [math.nan, 9.0, 9.0]]
    drafts.count(version_record([1, 1, 0, 1], logits=logits), [0, 1, 2, 3], [0, 1, 0, 0])
    assert fit_of(drafts.first_drafts).promised == pytest.approx((0.5 + 0.75 + 0.0) / 3)
    assert (fit_of(drafts.first_drafts).first_drafts, fit_of(drafts.first_drafts).accepted) == (3, 1)


def test_the_verdict_on_the_first_drafts_stays():
    drafts = Versions(("default", "a"))
    for _ in range(FIT_MOST // 64):
        drafts.count(version_record([1] * 64), list(range(64)), [1] * 64)
    fit = fit_of(drafts.first_drafts)
    drafts.count(version_record([1] * 64), list(range(64)), [0] * 64)
    assert fit_of(drafts.first_drafts) == fit


@pytest.mark.parametrize(("accepted", "warnings"), [(2, 1), (50, 0)])
def test_a_drafter_that_does_not_fit_is_named_in_the_log_once(caplog, accepted, warnings):
    drafts = Versions(("default", "a"))
    for _ in range(3):
        drafts.count(version_record([1] * 64), list(range(64)), [1] * accepted + [0] * (64 - accepted))
    assert sum("hardly predicts this target" in record.message for record in caplog.records) == warnings


def randomise(tensors, seed):
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for tensor in tensors:
            if tensor.ndim == 2:
                tensor.copy_(torch.randn(tensor.shape, generator=generator) * tensor.std())


def misfit_of(tokens, *, random_drafter=False, other_target=False, **options):
    """Return what is said of the golden pair, changed in one way, after some texts."""
    network, drafts = golden_network(), Versions(("default", "a"))
    if other_target:  # with the same embedding and LM head, which the drafter reads
        randomise(network.model.layers.parameters(), seed=2)
    loop = StageLoop(network=network, **(options or {"schedule": "static"}))
    if random_drafter:
        randomise(loop.drafter.model.parameters(), seed=1)
    learn = loop.schedule.observe

    def observe(record, running, accept_lens):
        drafts.count(record, running, accept_lens)
        learn(record, running, accept_lens)

    loop.schedule.observe = observe
    prompts = [case.prompt_ids[shift:] for case in load_golden(DRAFT).cases for shift in (0, 3)]
    loop.serve(prompts, tokens)
    return judged(drafts.first_drafts)


# Under this policy the confidence head is asked, and whole blocks are verified all the same.
ASKING = {"schedule": "threshold", "confidence_threshold": 0.0}


@pytest.mark.parametrize("options", [{}, ASKING], ids=["head unheard", "head heard"])
def test_the_golden_pair_fits(options):
    fit = misfit_of(48, **options)
    assert fit.verdict is FitVerdict.FITS
    assert fit.share > 0.5
    assert (fit.promised is None) == (not options)


@pytest.mark.parametrize(
    ("changed", "options"),
    [({"random_drafter": True}, ASKING), ({"other_target": True}, {})],
    ids=["random drafter, head heard", "other target, head unheard"],
)
def test_pairs_that_do_not_fit_are_named(changed, options):
    fit = misfit_of(10, **changed, **options)
    assert fit.verdict is FitVerdict.MISFIT, fit.sentence
