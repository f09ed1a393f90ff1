"""Copied candidates weigh nothing at first, then as much as those behind as many matched tokens were right."""

import numpy as np
import pytest
from dspark_kernels import ASKED_ROWS, CACHED_ROWS, KIND_ROWS

from sglang_dspark.scheduling.online_calibration import BOOST, WINDOW, ChainWeights

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


def test_chains_teach_what_stands_behind_as_many_matched_tokens():
    """A chain of 3 that is right three times is right behind 3, 4 and 5 tokens; another fails behind 6."""
    weights = ChainWeights(MOST)
    observe(weights, *[(3, 3, 4)] * 100, *[(6, 0, 4)] * 100)
    rates, *_ = weights.rates()
    assert (rates[3:6] > 0.95).all() and rates[6] < 0.02
    assert rates[7] == rates[2] == ChainWeights(MOST).rates()[0][7]
    boosts, _ = tables(weights)
    assert boosts[3, 0] == boosts[3, 2] == BOOST
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
    assert tables(weights)[0][3, 0] == BOOST
    for _ in range(20):
        observe(weights, *[(3, 0, 4)] * (WINDOW // 10))
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
    assert (tables(weights, CACHED_ROWS)[0][3:5] == BOOST).all() and not tables(weights)[0].any()


def test_chains_that_were_asked_for_weigh_all_there_is_and_teach_their_own_kind():
    weights = ChainWeights(MOST)
    boosts, least = tables(weights, ASKED_ROWS)
    assert (boosts[1:] == BOOST).all() and not boosts[0].any()
    observe(weights, *[(ASKED_ROWS + 2, 0, 4)] * 200, *[(3, 4, 4)] * 200)
    boosts, after = tables(weights, ASKED_ROWS)
    assert (boosts[1:] == BOOST).all()
    assert after[2, 0] < least[2, 0] - 2 and (after[4:] == least[4:]).all()
    assert tables(weights)[0][3, 0] == BOOST and tables(weights)[0][2, 0] == 0
