"""ECE, AUC, Brier and reliability bins against literal loops and known answers."""

import numpy as np
import pytest

from sglang_dspark.scheduling.sts import auc, brier, ece, ece_and_noise, reached, sigmoid, survived


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
