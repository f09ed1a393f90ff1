"""The value of a budget by earlier rounds: against a literal computation, and its shape."""

import numpy as np
import pytest

from sglang_dspark.scheduling.forecast import WINDOW_ROUNDS, LaggedSurvivals

SINGLE = 1e-6  # estimates are sums of float32


def random_rounds(rng, count, gamma=5):
    return rng.beta(3, 1, size=(count, gamma)).cumprod(1)


def worth(rounds, requests, depth, budget):
    """Mean, over batches of consecutive rounds, of the sum of the best survivals."""
    num_batches = max(1, min(WINDOW_ROUNDS, len(rounds)) // requests)
    sums = []
    for batch in range(num_batches):
        first = len(rounds) - (num_batches - batch) * requests
        cells = sorted((a for row in rounds[first : first + requests] for a in row[:depth]), reverse=True)
        sums.append(sum(cells[:budget]))
    return float(np.mean(sums))


@pytest.mark.parametrize("requests", [1, 2, 3, 7, 32, 100, 256, 300])
@pytest.mark.parametrize("depths", [(5,), (1, 2, 3, 4, 5)])
def test_gains_are_the_mean_of_the_best_over_batches(requests, depths):
    rng = np.random.default_rng(requests)
    rounds = random_rounds(rng, 400)
    survivals = LaggedSurvivals(5, depths)
    for chunk in np.split(rounds, 4):
        survivals.observe(chunk)
    kept = rounds[-WINDOW_ROUNDS:] if requests <= WINDOW_ROUNDS else np.resize(rounds[-WINDOW_ROUNDS:], (requests, 5))
    gains = survivals.gains(requests)
    assert gains.shape == (len(depths), requests * 5 + 1)
    for row, depth in zip(gains, depths, strict=True):
        for budget in {0, 1, 2, requests, requests * depth - 1, requests * depth, requests * 5}:
            assert row[budget] == pytest.approx(worth(kept, requests, depth, budget), rel=SINGLE)


def test_the_first_estimate_is_a_middling_drafter():
    survivals = LaggedSurvivals(3, (3,))
    assert survivals.num_observed == 0
    assert survivals.mean() == pytest.approx([0.7, 0.49, 0.343])
    for requests in (1, 2, 16, 64, 300):
        assert survivals.gains(requests)[0, -1] == pytest.approx(requests * (0.7 + 0.49 + 0.343), rel=SINGLE)


def test_the_first_estimate_soon_counts_for_little_and_then_for_nothing():
    survivals = LaggedSurvivals(2, (2,))
    survivals.observe(np.full((64, 2), 0.1))
    assert survivals.num_observed == 64
    assert survivals.mean()[0] == pytest.approx((64 * 0.1 + 16 * 0.7) / 80)
    survivals.observe(np.full((WINDOW_ROUNDS, 2), 0.1))
    assert survivals.mean() == pytest.approx([0.1, 0.1])


def test_only_the_last_rounds_count():
    survivals = LaggedSurvivals(2, (2,))
    survivals.observe(np.full((1000, 2), 0.9))
    survivals.observe(np.full((WINDOW_ROUNDS // 2, 2), 0.1))
    assert survivals.mean() == pytest.approx([0.5, 0.5])
    # requests beyond the window: as many rounds as there are
    survivals.observe(np.full((1000, 2), 0.3))
    assert survivals.gains(1000)[0, -1] == pytest.approx(600, rel=SINGLE)
    assert survivals.num_observed == 2000 + WINDOW_ROUNDS // 2


def test_a_new_round_is_seen_at_once():
    survivals = LaggedSurvivals(2, (2,))
    before = survivals.gains(4).copy()
    survivals.observe(np.zeros((4, 2)))
    assert (survivals.gains(4)[:, 1:] < before[:, 1:]).all()


def test_cut_blocks_are_completed_with_the_mean_ratio():
    survivals = LaggedSurvivals(3, (1, 2, 3))
    whole = np.tile([0.8, 0.4, 0.1], (WINDOW_ROUNDS, 1))
    survivals.observe(whole)
    cut = np.array([[0.6, np.nan, np.nan], [0.9, 0.9, np.nan]])
    survivals.observe(cut)
    assert np.isnan(cut).sum() == 3  # the argument is not written to
    expected = np.array([[0.6, 0.3, 0.075], [0.9, 0.9, 0.225]])
    mean = np.concatenate([whole[2:], expected]).mean(0)
    assert survivals.mean() == pytest.approx(mean)


def test_a_drafter_that_never_got_a_draft_through_divides_by_nothing():
    survivals = LaggedSurvivals(3, (3,))
    survivals.observe(np.zeros((WINDOW_ROUNDS, 3)))
    survivals.observe(np.array([[0.5, np.nan, np.nan]]))
    assert survivals.mean() == pytest.approx([0.5 / WINDOW_ROUNDS, 0, 0])
    assert np.isfinite(survivals.gains(3)).all()
