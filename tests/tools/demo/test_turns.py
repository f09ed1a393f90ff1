"""The order of a demo's questions, and what it makes of the machine's load."""

import itertools
from collections import Counter

import psutil
import pytest

from sglang_dspark.tools.demo.questioner import Answer
from sglang_dspark.tools.demo.turns import MODES, PLAIN, Measured, Turn, schedule, share_of_others


def test_every_mode_answers_every_prompt_once_per_round_and_right_after_the_others():
    turns = [turn for turns in schedule(num_prompts=4, num_rounds=3) for turn in turns]
    assert Counter(turns) == {Turn(r, p, mode): 1 for r in range(3) for p in range(4) for mode in MODES}
    groups = [turns[i : i + len(MODES)] for i in range(0, len(turns), len(MODES))]
    assert all(len({(turn.round, turn.prompt) for turn in group}) == 1 for group in groups)


def test_no_mode_always_follows_the_same_one():
    turns = [turn for turns in schedule(num_prompts=4, num_rounds=4) for turn in turns]
    followers = {(before.mode, after.mode) for before, after in itertools.pairwise(turns)}
    assert {(a, b) for a in MODES for b in MODES if a != b} <= followers
    assert schedule(4, 4) == schedule(4, 4)
    assert schedule(4, 4) != schedule(4, 4, seed=1)


def test_share_of_others_is_of_all_cores_and_of_the_answers_time():
    def run(seconds, others_s):
        return Measured(Turn(0, 0, PLAIN), Answer("", 1, seconds, 0, 0), others_s)

    assert share_of_others([run(3.0, 1.0), run(1.0, 1.0)]) == pytest.approx(0.5 / psutil.cpu_count())
    assert share_of_others([run(1.0, -0.01)]) == 0.0
