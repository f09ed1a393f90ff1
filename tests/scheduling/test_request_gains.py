"""Which requests are worth drafting."""

import numpy as np

from sglang_dspark.scheduling.request_gains import RETRY_STEPS, RequestGains

GOOD, BAD = np.array([[0.9, 0.6]]), np.array([[0.05, np.nan]])


def fed(key, survival, rounds, typical=1.0):
    gains = RequestGains()
    for _ in range(rounds):
        gains.observe([key], survival, typical)
    return gains


def test_a_request_without_history_is_worth_it():
    assert RequestGains().worth_drafting(["a", "b"], least=0.5) == [0, 1]


def test_one_bad_round_does_not_count_many_do():
    assert fed("a", BAD, 1).worth_drafting(["a"], least=0.5) == [0]
    assert fed("a", BAD, 30).worth_drafting(["a"], least=0.5) == []
    assert fed("a", GOOD, 30).worth_drafting(["a"], least=0.5) == [0]


def test_nobody_is_left_out_where_drafting_is_free():
    assert fed("a", BAD, 30).worth_drafting(["a"], least=0.0) == [0]


def test_left_out_requests_are_tried_again_now_and_then():
    gains = fed("a", BAD, 30)
    chosen = [bool(gains.worth_drafting(["a"], least=0.5)) for _ in range(3 * (RETRY_STEPS + 1))]
    assert [index for index, drafted in enumerate(chosen) if drafted] == [64, 129, 194]


def test_a_request_that_ended_is_forgotten():
    gains = fed("a", BAD, 30)
    gains.worth_drafting(["b"], least=0.5)
    assert gains.worth_drafting(["a"], least=0.5) == [0]


def test_memory_is_bounded_and_keeps_what_was_seen_last():
    gains = fed("first", BAD, 30)
    for index in range(5000):
        gains.observe([f"r{index}"], BAD, 1.0)
        if index == 3000:
            gains.observe(["first"], BAD, 1.0)
    assert len(gains._gains) == 4096
    assert gains.worth_drafting(["first"], least=0.5) == []
