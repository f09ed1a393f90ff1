"""The order of a demo's questions, and what it makes of the answers."""

import itertools
import math
from collections import Counter

import pytest

from sglang_dspark.tools.demo.contest import (
    AUTO,
    MODES,
    OFF,
    PLAIN,
    Answer,
    Turn,
    accept_length,
    answers_of,
    ratios,
    schedule,
)


def test_every_mode_answers_every_prompt_once_per_round_and_right_after_the_others():
    turns = list(schedule(num_prompts=4, num_rounds=3))
    assert Counter(turns) == {Turn(r, p, mode): 1 for r in range(3) for p in range(4) for mode in MODES}
    groups = [turns[i : i + len(MODES)] for i in range(0, len(turns), len(MODES))]
    assert all(len({(turn.round, turn.prompt) for turn in group}) == 1 for group in groups)


def test_no_mode_always_follows_the_same_one():
    turns = list(schedule(num_prompts=4, num_rounds=4))
    followers = {(before.mode, after.mode) for before, after in itertools.pairwise(turns)}
    assert {(a, b) for a in MODES for b in MODES if a != b} <= followers
    assert list(schedule(4, 4)) == turns
    assert list(schedule(4, 4, seed=1)) != turns


def test_a_ratio_pairs_the_same_prompt_in_the_same_round():
    """Round 1 ran on a machine half as fast, and was asked in another order: the ratios do not spread."""
    speeds = {
        PLAIN: {(0, 0): 10, (0, 1): 20, (1, 0): 5, (1, 1): 10},
        AUTO: {(1, 1): 20, (1, 0): 10, (0, 1): 40, (0, 0): 20},
    }
    answers = {
        Turn(index, prompt, mode): Answer("text", speed, 10, 25)
        for mode, given in speeds.items()
        for (index, prompt), speed in given.items()
    }
    assert ratios(answers, AUTO, PLAIN) == pytest.approx([2] * 4)
    assert ratios(answers, AUTO, PLAIN, prompt=1) == pytest.approx([2] * 2)
    assert [answer.tokens_per_second for answer in answers_of(answers, PLAIN, prompt=1)] == [20, 10]
    assert answers_of(answers, OFF) == []


def test_accept_length_pools_the_counts():
    assert accept_length([Answer("a", 30, 10, 29), Answer("b", 10, 10, 9)]) == 1.9
    assert math.isnan(accept_length([Answer("a", 30, 0, 0)]))
