"""Requests and positions have shown something: how fast it is forgotten, and which requests are worth drafting."""

import numpy as np
import pytest

from sglang_dspark.scheduling.position_acceptance import PositionAcceptance
from sglang_dspark.scheduling.request_acceptance import RETRY_STEPS, RequestAcceptance

GOOD, BAD = np.array([[0.9, 0.6]]), np.array([[0.05, np.nan]])


def fed(key, survival, rounds):
    known = RequestAcceptance()
    for _ in range(rounds):
        known.observe([key], survival)
    return known


def test_a_request_without_history_is_worth_it():
    assert RequestAcceptance().worth_drafting(["a", "b"], minimum=0.5) == [0, 1]


def test_one_bad_round_does_not_count_many_do():
    assert fed("a", BAD, 1).worth_drafting(["a"], minimum=0.5) == [0]
    assert fed("a", BAD, 30).worth_drafting(["a"], minimum=0.5) == []
    assert fed("a", GOOD, 30).worth_drafting(["a"], minimum=0.5) == [0]


def test_no_request_is_left_out_if_drafting_is_free():
    assert fed("a", BAD, 30).worth_drafting(["a"], minimum=0.0) == [0]


def test_left_out_requests_are_tried_again_now_and_then():
    known = fed("a", BAD, 30)
    chosen = [bool(known.worth_drafting(["a"], minimum=0.5)) for _ in range(3 * (RETRY_STEPS + 1))]
    assert [index for index, drafted in enumerate(chosen) if drafted] == [64, 129, 194]


def left_out(mean, spread, minimum, rounds, requests=400):
    """Share of requests that are left out after so many rounds of this mean and spread."""
    known, rng, ids = RequestAcceptance(), np.random.default_rng(0), list(range(requests))
    for _ in range(rounds):
        known.observe(ids, rng.normal(mean, spread, (requests, 1)))
    return 1 - len(known.worth_drafting(ids, minimum)) / requests


def test_a_request_that_is_worth_it_by_a_little_is_not_given_up_for_a_few_bad_rounds():
    assert max(left_out(0.5, 0.8, 0.4, rounds) for rounds in (8, 16, 32, 64)) < 0.03
    assert left_out(0.5, 0.8, 0.5, 32) < 0.06


def test_a_request_far_below_is_left_out_soon():
    assert left_out(0.2, 0.3, 0.7, 10) > 0.9
    assert left_out(0.2, 0.8, 0.7, 32) > 0.9


def test_a_request_left_out_comes_back_when_a_round_is_out_of_all_proportion():
    known = fed("a", BAD, 30)
    assert known.worth_drafting(["a"], minimum=0.25) == []
    known.observe(["a"], np.array([[0.95, 0.9, 0.85]]))
    assert known.worth_drafting(["a"], minimum=0.25) == [0]


def test_a_request_that_ended_is_forgotten():
    known = fed("a", BAD, 30)
    known.worth_drafting(["b"], minimum=0.5)
    assert known.worth_drafting(["a"], minimum=0.5) == [0]


def test_memory_is_bounded_and_keeps_what_was_seen_last():
    known = fed("first", BAD, 30)
    for index in range(5000):
        known.observe([f"r{index}"], BAD)
        if index == 3000:
            known.observe(["first"], BAD)
    assert len(known._by_request) == 4096
    assert known.worth_drafting(["first"], minimum=0.5) == []


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
