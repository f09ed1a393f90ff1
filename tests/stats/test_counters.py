"""Counters of drafted, verified, accepted and committed tokens."""

from sglang_dspark.stats.counters import LOW_ACCEPT_ROUNDS, Counters


def test_sums_and_survival():
    counters = Counters(gamma=3)
    assert counters.report()["accept_length"] is None
    counters.record([3, 3], verify_lens=[3, 3], accept_lens=[3, 1], copied_lens=[0, 0])
    counters.record([3, 3], verify_lens=[2, 0], accept_lens=[0, 0], copied_lens=[0, 0])
    assert counters.report() == {
        "steps": 2,
        "plain_steps": 0,
        "rounds": 4,
        "drafted_tokens": 12,
        "copied_tokens": 0,
        "copied_accepted_tokens": 0,
        "verified_tokens": 8,
        "accepted_tokens": 4,
        "committed_tokens": 8,
        "accept_length": 2.0,
        # position 0 was verified three times and kept twice; position 2 verified twice and kept once
        "survival": [2 / 3, 1 / 3, 1 / 2],
    }


def test_copied_drafts_say_nothing_about_the_drafter():
    counters = Counters(gamma=3)
    counters.record([0, 3], verify_lens=[2, 3], accept_lens=[1, 0], copied_lens=[2, 0])
    counters.record([0], verify_lens=[3], accept_lens=[3], copied_lens=[3])
    report = counters.report()
    assert (report["plain_steps"], report["drafted_tokens"], report["verified_tokens"]) == (0, 3, 8)
    assert (report["copied_tokens"], report["copied_accepted_tokens"], report["accepted_tokens"]) == (5, 4, 4)
    assert report["survival"] == [0, 0, 0]
    for _ in range(LOW_ACCEPT_ROUNDS):
        counters.record([7, 0], [3, 3], [0, 3], [0, 3])
    assert counters.looks_miswired


def test_text_for_the_log():
    counters = Counters(gamma=2)
    assert str(counters).endswith("accept length -")
    counters.record([2], [2], [1], [0])
    assert str(counters) == "drafted 2, verified 2, accepted 1, committed 2, accept length 2.00"


def test_a_drafter_that_predicts_nothing_is_noticed_only_after_enough_rounds():
    noise, weak = Counters(gamma=7), Counters(gamma=7)
    for i in range(LOW_ACCEPT_ROUNDS - 1):
        noise.record([7], [7], [int(i % 10 == 0)], [0])
        weak.record([7], [7], [int(i % 3 == 0)], [0])
    assert not noise.looks_miswired
    noise.record([7], [7], [0], [0])
    weak.record([7], [7], [0], [0])
    assert noise.looks_miswired
    assert not weak.looks_miswired


def test_rounds_without_drafts_say_nothing_about_the_drafter():
    counters = Counters(gamma=7)
    for _ in range(2 * LOW_ACCEPT_ROUNDS):
        counters.record([0], [0], [0], [0])
    assert counters.accept_length == 1.0
    assert not counters.looks_miswired
