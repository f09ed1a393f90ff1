"""Acceptance by position follows the outcomes, and forgets old ones."""

import numpy as np
import pytest

from sglang_dspark.scheduling.forecast import PositionAcceptance


def observe(positions, rng, conditional, rounds, batch=8, verified=None):
    gamma = len(conditional)
    for _ in range(rounds // batch):
        kept = (rng.random((batch, gamma)) < conditional).cumprod(1).sum(1)
        lens = np.full(batch, gamma) if verified is None else rng.integers(0, verified + 1, size=batch)
        positions.observe(lens, np.minimum(kept, lens))


def test_it_starts_in_the_middle():
    assert PositionAcceptance(3).conditional() == pytest.approx([0.7, 0.7, 0.7])


def test_only_drafts_that_were_put_to_the_test_are_judged():
    positions = PositionAcceptance(4)
    positions.observe(np.array([4, 4, 2, 0]), np.array([4, 1, 2, 0]))
    # position 0: 3 of 3; 1: 2 of 3 (the second round failed there); 2: 1 of 1; 3: 1 of 1
    prior, judged, kept = 16.0, np.array([3, 3, 1, 1]), np.array([3, 2, 1, 1])
    faded = prior * np.exp(-judged / 256)
    assert positions.conditional() == pytest.approx((0.7 * faded + kept) / (faded + judged))


@pytest.mark.parametrize("verified", [None, 4])
def test_it_converges_however_much_is_verified(verified):
    conditional = np.array([0.9, 0.6, 0.8, 0.3])
    positions = PositionAcceptance(4)
    observe(positions, np.random.default_rng(0), conditional, 20_000, verified=verified)
    assert positions.conditional() == pytest.approx(conditional, abs=0.1)


def test_it_forgets():
    positions, rng = PositionAcceptance(1), np.random.default_rng(0)
    observe(positions, rng, [0.9], 5000)
    observe(positions, rng, [0.2], 256)
    assert positions.conditional()[0] == pytest.approx(0.2 + 0.7 / np.e, abs=0.08)
    observe(positions, rng, [0.2], 2000)
    assert positions.conditional()[0] == pytest.approx(0.2, abs=0.08)


def test_positions_that_are_never_verified_keep_what_they_have():
    positions, rng = PositionAcceptance(3), np.random.default_rng(0)
    observe(positions, rng, [0.9, 0.9, 0.9], 800)
    before = positions.conditional()
    observe(positions, rng, [0.0, 0.0, 0.0], 800, verified=1)
    assert positions.conditional()[0] < 0.4
    assert positions.conditional()[1:].tolist() == before[1:].tolist()


def test_nothing_is_learned_from_nothing():
    positions = PositionAcceptance(2)
    positions.observe(np.zeros(3, np.int64), np.zeros(3, np.int64))
    assert positions.conditional() == pytest.approx([0.7, 0.7])
