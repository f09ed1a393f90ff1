"""Tests of online recalibration, of the weights of copied candidates, and of verdicts about drafters."""

import json
import math

import numpy as np
import pytest
from draft_heads import DISTORTIONS, GAMMA, draw_rounds, survival_eces
from dspark_kernels import ASKED_ROWS, CACHED_ROWS, KIND_ROWS

from sglang_dspark.scheduling.online_calibration import (
    CHAIN_BOOST,
    CHAIN_WINDOW,
    FIRST_REFIT_ROUNDS,
    FIT_CHANCE,
    FIT_FEWEST,
    REFIT_ROUNDS,
    REFIT_STEPS,
    WINDOW_PAIRS,
    ChainWeights,
    DrafterFit,
    FitVerdict,
    OnlineCalibration,
)
from sglang_dspark.scheduling.sts import SCALE_BOUNDS, SHIFT_BOUNDS, StsCalibration, sigmoid


def run(calibration, rng, distortion, num_steps, bs=4):
    for _ in range(num_steps):
        logits, accepted = draw_rounds(rng, bs)
        calibration.observe(distortion(logits), np.full(bs, GAMMA), accepted)


def fresh_eces(scale, shift, distortion):
    logits, accepted = draw_rounds(np.random.default_rng(12345), 50_000)
    return np.array(survival_eces(scale * distortion(logits) + shift, accepted))


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("name", DISTORTIONS)
def test_a_distorted_head_is_calibrated_within_300_steps_of_4_requests(name, seed):
    distortion, calibration = DISTORTIONS[name], OnlineCalibration(GAMMA)
    if name != "none":
        assert fresh_eces(1.0, 0.0, distortion).min() > 0.09
    run(calibration, np.random.default_rng(seed), distortion, 300)
    assert fresh_eces(calibration.scale, calibration.shift, distortion).max() < 0.03


def test_it_starts_from_the_temperatures_and_is_pulled_to_them():
    calibration = OnlineCalibration(2, initial=(2.0, 0.5))
    assert calibration.scale.tolist() == [0.5, 2.0]
    assert calibration.shift.tolist() == [0.0, 0.0]
    for _ in range(REFIT_STEPS):
        # a logit of 0 says nothing about the scale, and the second draft is never verified
        calibration.observe(np.zeros((4, 2)), [1] * 4, [1, 0, 1, 0])
    assert calibration.num_refits == 1
    assert calibration.scale == pytest.approx([0.5, 2.0])
    assert calibration.shift == pytest.approx([0.0, 0.0])


@pytest.mark.parametrize(("bs", "expected"), [(1, [8, 24, 40, 72, 136, 200, 264]), (64, [1, *range(17, 300, 16)])])
def test_the_first_fits_come_early(bs, expected):
    """A lone user's head that is far off is corrected after 8 rounds, and later fits are as rare as they can be."""
    calibration, rng, fitted = OnlineCalibration(GAMMA), np.random.default_rng(0), []
    for step in range(1, 300):
        before = calibration.num_refits
        run(calibration, rng, DISTORTIONS["minus 3"], 1, bs)
        fitted += [step] * (calibration.num_refits - before)
    assert fitted == expected


def test_the_fit_is_the_optimum_of_the_penalised_likelihood():
    calibration, rng = OnlineCalibration(1), np.random.default_rng(0)
    logits, accepted = draw_rounds(rng, REFIT_ROUNDS, gamma=1)
    logits = 2 * logits - 1
    for _ in range(60):
        # the same rounds again and again, as often as the window holds them
        calibration.observe(np.tile(logits, (16, 1)), np.ones(16 * REFIT_ROUNDS), np.tile(accepted, 16))
        for _ in range(REFIT_STEPS - 1):
            calibration.observe(logits[:1], [1], accepted[:1])
    z, y = calibration._pairs.values
    residual = y - sigmoid(calibration.scale[:, None] * z + calibration.shift[:, None])
    assert (residual * z).sum() == pytest.approx(1.0 * (calibration.scale[0] - 1), abs=1e-6)
    assert residual.sum() == pytest.approx(0.25 * calibration.shift[0], abs=1e-6)


def outcomes(name, z):
    return {
        "all accepted": np.ones_like(z),
        "all rejected": np.zeros_like(z),
        "separable": z > 1.5,
        "anti-separable": z < 1.5,
    }[name].astype(int)


@pytest.mark.parametrize("spread", [0.0, 1e-3, 1.5, 1e4])
@pytest.mark.parametrize("name", ["all accepted", "all rejected", "separable", "anti-separable"])
def test_degenerate_windows_stay_finite_and_bounded(name, spread):
    calibration, rng = OnlineCalibration(1), np.random.default_rng(0)
    with np.errstate(all="raise"):
        for _ in range(50 * REFIT_STEPS):
            z = rng.normal(1.5, spread, (4, 1))
            calibration.observe(z, [1] * 4, outcomes(name, z)[:, 0])
    assert calibration.num_refits == 50
    assert SCALE_BOUNDS[0] <= calibration.scale[0] <= SCALE_BOUNDS[1]
    assert SHIFT_BOUNDS[0] <= calibration.shift[0] <= SHIFT_BOUNDS[1]
    typical = sigmoid(calibration.scale * 1.5 + calibration.shift)[0]
    if spread < 1e4 and name.startswith("all"):
        assert typical == pytest.approx(float(name == "all accepted"), abs=0.02)
    if name == "anti-separable" and spread > 1:
        assert calibration.scale[0] == SCALE_BOUNDS[0]


def test_copied_drafts_after_those_of_the_head_teach_nothing(tmp_path):
    """A file for the drafter's own block serves blocks with copied drafts after it."""
    StsCalibration((2.0, 0.5)).save(tmp_path / "sts.json")
    calibration = OnlineCalibration.from_file(str(tmp_path / "sts.json"), 2, max_verify=4)
    assert calibration.scale.tolist() == [0.5, 2.0, 1.0, 1.0]
    for _ in range(REFIT_STEPS):
        calibration.observe(np.ones((4, 4)), [4, 4, 2, 1], [4, 3, 1, 0])
    assert calibration.num_refits == 1
    assert calibration.report()["pairs"] == [4 * REFIT_STEPS, 3 * REFIT_STEPS, 0, 0]
    assert (calibration.scale[2:].tolist(), calibration.shift[2:].tolist()) == ([1.0, 1.0], [0.0, 0.0])


def test_only_drafts_that_were_put_to_the_test_are_pairs():
    calibration = OnlineCalibration(3)
    logits = np.arange(12.0).reshape(4, 3)
    # all accepted; rejected at the second; two verified and kept; not drafted
    calibration.observe(logits, [3, 3, 2, 0], [3, 1, 2, 0])
    assert calibration.report()["pairs"] == [3, 3, 1]
    z, y = calibration._pairs.values
    assert z[:, :3].tolist() == [[0, 3, 6], [1, 4, 7], [2, 0, 0]]
    assert y[:, :3].tolist() == [[1, 1, 1], [1, 0, 1], [1, 0, 0]]


@pytest.mark.parametrize("bs", [1, 3, 700])
def test_the_window_holds_the_newest_pairs(bs):
    calibration, rng = OnlineCalibration(2), np.random.default_rng(0)
    seen = [[], []]
    for _ in range(3000 // bs + 1):
        logits, accepted = draw_rounds(rng, bs, gamma=2)
        calibration.observe(logits, [2] * bs, accepted)
        for (first, second), count in zip(logits.astype(np.float32).tolist(), accepted, strict=True):
            seen[0].append(first)
            seen[1] += [second] * int(count > 0)
    assert calibration.report()["pairs"] == [len(row) for row in seen]
    for stored, row in zip(calibration._pairs.values[0], seen, strict=True):
        assert sorted(stored.tolist()) == sorted(row[-WINDOW_PAIRS:])


def test_rounds_with_nan_are_left_out():
    calibration, rng = OnlineCalibration(2), np.random.default_rng(0)
    for _ in range(REFIT_STEPS):
        logits, accepted = draw_rounds(rng, 5, gamma=2)
        logits[0, 1] = math.nan
        logits[1, 0] = math.inf
        calibration.observe(logits, [2] * 5, accepted)
    assert calibration.num_refits == 1
    assert np.isfinite([calibration.scale, calibration.shift]).all()
    assert calibration.report()["rounds"] == 3 * REFIT_STEPS


def test_the_report_before_and_after_observations():
    calibration = OnlineCalibration(2)
    empty = calibration.report()
    assert empty["pairs"] == [0, 0]
    assert empty["survival_ece"] == empty["conditional_ece"] == [None, None]
    calibration.observe([[0.0, 0.0]] * 4, [2, 2, 1, 1], [2, 1, 1, 0])
    report = json.loads(json.dumps(calibration.report()))
    assert report == {
        "rounds": 4,
        "refits": 0,
        "pairs": [4, 2],
        "scale": [1.0, 1.0],
        "shift": [0.0, 0.0],
        # first draft: predicted 1/2, kept 3 times of 4; second: two rounds verified it, predicted 1/4, one kept it
        "survival_ece": [0.25, 0.25],
        "conditional_ece": [0.25, 0.0],
    }


def test_errors_are_those_of_the_map_that_was_in_force():
    calibration, rng = OnlineCalibration(GAMMA), np.random.default_rng(0)
    run(calibration, rng, DISTORTIONS["minus 3"], FIRST_REFIT_ROUNDS // 4)
    assert calibration.num_refits == 1
    # by now the map is far better, but nothing was predicted with it yet
    assert calibration.report()["survival_ece"][0] > 0.4
    run(calibration, rng, DISTORTIONS["minus 3"], 2000)
    assert max(calibration.report()["survival_ece"]) < 0.04


MOST, SLOTS = 14, 3
SCALE, SHIFT = np.full(SLOTS, 2.0), np.full(SLOTS, -0.5)


def observe(weights, *rounds):
    """Rounds of (matched, right, seen)."""
    weights.observe(*(np.array(column) for column in zip(*rounds, strict=True)))


def tables(weights, first=0):
    return weights.table(SCALE, SHIFT)[:, first : first + KIND_ROWS]


def test_nothing_weighs_anything_until_it_was_seen():
    weights = ChainWeights(MOST)
    boosts, least = tables(weights)
    assert not boosts.any() and np.isneginf(least).all()
    observe(weights, *[(0, 0, 4)] * 50)  # rounds without a chain
    assert not tables(weights)[0].any()


def test_chains_teach_what_follows_as_many_matched_tokens():
    """A chain of 3 that is right three times is right after 3, 4 and 5 tokens; another fails after 6."""
    weights = ChainWeights(MOST)
    observe(weights, *[(3, 3, 4)] * 100, *[(6, 0, 4)] * 100)
    rates, *_ = weights.rates()
    assert (rates[3:6] > 0.95).all() and rates[6] < 0.02
    assert rates[7] == rates[2] == ChainWeights(MOST).rates()[0][7]
    boosts, _ = tables(weights)
    assert boosts[3, 0] == boosts[3, 2] == CHAIN_BOOST
    assert boosts[5, 0] == boosts[4, 1] == boosts[3, 2]
    assert boosts[6, 0] == boosts[5, 1] == boosts[4, 2] == 0
    assert not boosts[0].any()


def test_a_place_is_tested_only_if_all_before_it_were_right():
    weights = ChainWeights(MOST)
    observe(weights, (4, 1, 3), (4, 3, 3))
    assert weights._counts[1, 0, 3:9].tolist() == pytest.approx([0, 2, 2, 1, 0, 0])
    assert weights._counts[0, 0, 3:9].tolist() == pytest.approx([0, 2, 1, 1, 0, 0])


def test_tokens_past_the_longest_match_count_for_it():
    weights = ChainWeights(MOST)
    observe(weights, *[(8, MOST, MOST)] * 50)
    assert (weights.rates()[0][MOST - 1 :] > 0.9).all()


def test_what_is_right_today_outweighs_what_was_right_before():
    weights = ChainWeights(MOST)
    for _ in range(20):
        observe(weights, *[(3, 4, 4)] * 100)
    assert tables(weights)[0][3, 0] == CHAIN_BOOST
    for _ in range(20):
        observe(weights, *[(3, 0, 4)] * (CHAIN_WINDOW // 10))
    assert tables(weights)[0][3, 0] == 0


def test_weights_are_finite():
    weights = ChainWeights(MOST)
    for _ in range(40):
        observe(weights, *[(3, 4, 4)] * 10_000)
    assert np.isfinite(tables(weights)[1][3]).all()


def test_the_confidence_asked_for_is_the_rate_once_it_is_calibrated():
    weights = ChainWeights(MOST)
    observe(weights, *[(5, 1, 2)] * 90, *[(5, 0, 2)] * 10)
    least = tables(weights)[1][5, 0]
    assert 1 / (1 + np.exp(-(SCALE[0] * least + SHIFT[0]))) == pytest.approx(weights.rates()[0][5])


def test_chains_of_earlier_answers_teach_their_own_kind():
    weights = ChainWeights(MOST)
    observe(weights, *[(CACHED_ROWS + 3, 4, 4)] * 50, *[(4, 0, 4)] * 50)
    assert (tables(weights, CACHED_ROWS)[0][3:5] == CHAIN_BOOST).all() and not tables(weights)[0].any()


def test_chains_that_were_asked_for_weigh_all_there_is_and_teach_their_own_kind():
    weights = ChainWeights(MOST)
    boosts, least = tables(weights, ASKED_ROWS)
    assert (boosts[1:] == CHAIN_BOOST).all() and not boosts[0].any()
    observe(weights, *[(ASKED_ROWS + 2, 0, 4)] * 200, *[(3, 4, 4)] * 200)
    boosts, after = tables(weights, ASKED_ROWS)
    assert (boosts[1:] == CHAIN_BOOST).all()
    assert after[2, 0] < least[2, 0] - 2 and (after[4:] == least[4:]).all()
    assert tables(weights)[0][3, 0] == CHAIN_BOOST and tables(weights)[0][2, 0] == 0


@pytest.mark.parametrize(
    ("case", "share", "promised", "verdict"),
    [
        ("good", 0.7, 0.72, FitVerdict.FITS),
        ("hard texts, and the head knows it", 0.15, 0.2, FitVerdict.FITS),
        ("overconfident under a seed", 0.3, 0.75, FitVerdict.FITS),
        ("weak, without a head", 0.2, None, FitVerdict.FITS),
        ("random weights", 0.0, 0.5, FitVerdict.MISFIT),
        ("random weights, and the head promises nothing", 0.0, 0.01, FitVerdict.MISFIT),
        ("wrong taps", 0.08, 0.5, FitVerdict.MISFIT),
        ("wrong taps, without a head", 0.08, None, FitVerdict.MISFIT),
    ],
)
def test_verdicts(case, share, promised, verdict):
    fit = DrafterFit(1000, round(1000 * share), promised)
    assert fit.verdict is verdict
    assert (fit.warning is not None) == (verdict is FitVerdict.MISFIT)


def test_nothing_is_said_of_few_drafts():
    assert DrafterFit().verdict is FitVerdict.UNKNOWN
    assert DrafterFit().report()["accepted"] is None
    assert DrafterFit(FIT_FEWEST - 1, 0, 0.9).verdict is FitVerdict.UNKNOWN
    assert DrafterFit(FIT_FEWEST, 0, 0.9).verdict is FitVerdict.MISFIT


def test_the_interval_holds():
    """One in a thousand drafters that are as good as chance looks worse than its interval allows."""
    accepted = np.random.default_rng(0).binomial(200, FIT_CHANCE, size=20_000)
    missed = np.mean([DrafterFit(200, int(count)).most < FIT_CHANCE for count in accepted])
    assert missed < 0.003
    assert DrafterFit(10_000, 500).most == pytest.approx(FIT_CHANCE, abs=0.008)


def test_the_warning_says_what_was_found():
    warning = DrafterFit(200, 4, 0.61).warning
    assert "2.0% of 200 first drafts were accepted; its own confidence promised 61%" in warning
    assert DrafterFit(200, 4).sentence == "2.0% of 200 first drafts were accepted"
