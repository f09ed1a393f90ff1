"""Tests of Sequential Temperature Scaling and its file, and of measures of calibration."""

import json
import math
import re

import numpy as np
import pytest
from draft_heads import GAMMA, draw_rounds, survival_eces

from sglang_dspark.errors import ConfigError
from sglang_dspark.scheduling.sts import (
    StsCalibration,
    auc,
    brier,
    ece,
    ece_and_noise,
    fit_sts,
    reached,
    sigmoid,
    survived,
)


@pytest.mark.parametrize("factor", [1 / 3, 1.0, 1.7, 3.0])
def test_a_stretched_head_is_mended(factor):
    rng = np.random.default_rng(0)
    logits, accepted = draw_rounds(rng, 20_000)
    temperatures = fit_sts(factor * logits, accepted)
    # ECE is flat near its minimum: what counts is the error, not the temperature
    assert temperatures == pytest.approx(factor, rel=0.25)
    fresh, outcome = draw_rounds(rng, 50_000)
    before, after = (survival_eces(factor * fresh / t, outcome) for t in (1.0, temperatures))
    assert max(after) < 0.015
    assert factor == 1.0 or min(before) > 0.06


def test_positions_are_fitted_in_order_with_the_earlier_ones_frozen():
    logits, accepted = draw_rounds(np.random.default_rng(3), 500, gamma=3)
    logits *= 2
    temperatures = fit_sts(logits, accepted)
    assert fit_sts(logits[:, :2], np.minimum(accepted, 2)).tolist() == temperatures[:2].tolist()
    survival = sigmoid(logits[:, 0] / temperatures[0]) * sigmoid(logits[:, 1] / temperatures[1])
    grid = np.geomspace(1 / 4, 4, 201)
    errors = [ece(survival * sigmoid(logits[:, 2] / t), accepted > 2) for t in grid]
    assert temperatures[2] == pytest.approx(grid[int(np.argmin(errors))])


def test_ties_go_to_the_temperature_nearest_one():
    assert fit_sts(np.zeros((10, 3)), np.array([0, 1, 2, 3, 0, 1, 2, 3, 0, 1])).tolist() == [1.0, 1.0, 1.0]


def test_the_grid_ends_at_a_quarter_and_at_four():
    rng = np.random.default_rng(0)
    logits, accepted = draw_rounds(rng, 2000, gamma=1)
    assert fit_sts(50 * logits, accepted) == pytest.approx([4.0])
    assert fit_sts(logits / 50, accepted) == pytest.approx([0.25])


@pytest.mark.parametrize("logits", [np.zeros((0, 3)), np.full((2, 3), math.nan)])
def test_what_cannot_be_fitted_is_refused(logits):
    with pytest.raises(ConfigError, match="logits"):
        fit_sts(logits, np.zeros(len(logits), dtype=int))


@pytest.fixture
def calibration():
    temperatures = tuple(1 + k / 10 for k in range(GAMMA))
    return StsCalibration(temperatures, "org/Target-8B", "/models/draft", "a.jsonl", 100, (0.1,) * 7, (0.02,) * 7)


def test_a_file_is_read_as_it_was_written(tmp_path, calibration):
    path = tmp_path / "sts.json"
    calibration.save(path)
    assert StsCalibration.load(path, GAMMA) == calibration
    assert json.loads(path.read_text())["version"] == 1
    StsCalibration((1.0,)).save(path)
    assert StsCalibration.load(path, 1, target="any", draft="pair") == StsCalibration((1.0,))


def test_the_same_model_may_lie_elsewhere(tmp_path, calibration):
    path = tmp_path / "sts.json"
    calibration.save(path)
    assert StsCalibration.load(path, GAMMA, target="/mnt/target-8b/", draft="draft") == calibration


@pytest.mark.parametrize(
    ("pair", "says"),
    [
        ({"target": "other"}, "target='org/Target-8B': but 'other' is served"),
        ({"draft": "/models/draft2"}, "draft='/models/draft': but '/models/draft2' is served; calibrate this pair"),
    ],
)
def test_the_file_of_another_pair_is_refused(tmp_path, calibration, pair, says):
    path = tmp_path / "sts.json"
    calibration.save(path)
    with pytest.raises(ConfigError, match=re.escape(f"{path}: {says}")):
        StsCalibration.load(path, GAMMA, **pair)


GOOD = {"version": 1, "temperatures": [1.0, 2.0]}


@pytest.mark.parametrize(
    ("document", "says"),
    [
        ({**GOOD, "version": 2}, ": Invalid value 2 - at `$.version`; make one with sglang-dspark calibrate"),
        ({"temperatures": [1.0, 2.0]}, " has no version, as files for SGLang's own worker"),
        ({**GOOD, "temperatures": [1.0]}, ": 1 temperatures for blocks of 2 drafts"),
        ({"version": 1}, ": Object missing required field `temperatures`"),
        ({**GOOD, "temperatures": [1.0, "2"]}, ": Expected `float`, got `str` - at `$.temperatures[1]`"),
        ({**GOOD, "temperatures": [1.0, 0]}, ": Expected `float` >= 0.05 - at `$.temperatures[1]`"),
        ({**GOOD, "temperatures": [21.0, 1.0]}, ": Expected `float` <= 20.0 - at `$.temperatures[0]`"),
        ({**GOOD, "temperatures": [math.nan, 1.0]}, ": JSON is malformed"),
        ({**GOOD, "tempratures": []}, ": Object contains unknown field `tempratures`"),
        ({**GOOD, "num_samples": "many"}, ": Expected `int`, got `str` - at `$.num_samples`"),
        ([1.0, 2.0], ": Expected `object`, got `array`"),
    ],
)
def test_a_malformed_file_is_refused(tmp_path, document, says):
    path = tmp_path / "sts.json"
    path.write_text(json.dumps(document))
    with pytest.raises(ConfigError, match=re.escape(f"{path}{says}")):
        StsCalibration.load(path, 2)


def test_files_that_are_missing_or_not_writable(tmp_path, calibration):
    with pytest.raises(ConfigError, match=r"sts\.json.*No such file.*; make one with"):
        StsCalibration.load(tmp_path / "sts.json", 2)
    with pytest.raises(ConfigError, match="cannot be written"):
        calibration.save(tmp_path)


def literal_ece(predicted, observed, num_bins=20):
    total = 0.0
    for b in range(num_bins):
        inside = [i for i, p in enumerate(predicted) if min(int(p * num_bins), num_bins - 1) == b]
        if inside:
            gap = np.mean([predicted[i] for i in inside]) - np.mean([observed[i] for i in inside])
            total += len(inside) / len(predicted) * abs(gap)
    return total


@pytest.fixture(params=[1, 7, 1000])
def sample(request):
    rng = np.random.default_rng(request.param)
    predicted = np.concatenate([rng.random(request.param), [0.0, 1.0, 0.05, 0.95]])
    return predicted, rng.random(len(predicted)) < predicted**2


def test_ece_and_brier_equal_their_definitions(sample):
    predicted, observed = sample
    assert ece(predicted, observed) == pytest.approx(literal_ece(predicted, observed), abs=1e-12)
    assert brier(predicted, observed) == pytest.approx(
        np.mean([(p - o) ** 2 for p, o in zip(predicted, observed, strict=True)])
    )


def test_auc_counts_pairs_and_half_of_the_ties():
    # values apart by more than a bin of 1/1000, or equal
    predicted = np.array([0.1, 0.3, 0.3, 0.8, 0.9])
    observed = np.array([False, False, True, True, False])
    wins = [1.0 if p > q else 0.5 if p == q else 0.0 for p in predicted[observed] for q in predicted[~observed]]
    assert auc(predicted, observed) == pytest.approx(np.mean(wins))


def test_auc_of_extremes():
    predicted = np.array([0.1, 0.9])
    assert auc(predicted, np.array([False, True])) == 1.0
    assert auc(predicted, np.array([True, False])) == 0.0
    assert auc(np.array([0.5, 0.5]), np.array([True, False])) == 0.5
    assert auc(predicted, np.array([True, True])) is None
    assert auc(predicted, np.array([False, False])) is None


def test_the_noise_is_the_ece_of_perfect_predictions():
    rng = np.random.default_rng(0)
    found, foretold = [], []
    for _ in range(50):
        predicted = rng.random(1000)
        error, noise = ece_and_noise(predicted, rng.random(1000) < predicted)
        found.append(error)
        foretold.append(noise)
    assert np.mean(found) == pytest.approx(np.mean(foretold), rel=0.1)


def test_sigmoid_does_not_overflow():
    with np.errstate(all="raise"):
        assert sigmoid([-1e30, 0.0, 1e30]).tolist() == [0.0, 0.5, 1.0]
    assert sigmoid(2.0) == pytest.approx(1 / (1 + np.exp(-2.0)))


def test_outcomes_of_accepted_and_verified_counts():
    verified, accepted = np.array([3, 3, 2, 0]), np.array([0, 3, 2, 0])
    assert survived(accepted, 3).astype(int).tolist() == [[0, 0, 0], [1, 1, 1], [1, 1, 0], [0, 0, 0]]
    # the first rejection is an observation; what was never verified is none
    assert reached(verified, accepted, 3).astype(int).tolist() == [[1, 0, 0], [1, 1, 1], [1, 1, 0], [0, 0, 0]]
