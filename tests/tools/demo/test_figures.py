"""Medians, spreads and ratios of a demo, on answers with known times."""

import pytest

from sglang_dspark.tools.demo.figures import Spread, accept_length, answers, first_difference, ratio, speed
from sglang_dspark.tools.demo.questioner import Answer
from sglang_dspark.tools.demo.turns import AUTO, OFF, PLAIN, Measured, Turn


def measured(mode, index, prompt, tokens_per_second):
    return Measured(Turn(index, prompt, mode), Answer("text", 100, 100 / tokens_per_second, 10, 25), 0.0)


def test_a_spread_is_the_median_and_the_middle_half():
    assert Spread.of([5, 1, 4, 2, 3]) == Spread(3, 2, 4)


def test_a_ratio_pairs_the_same_prompt_in_the_same_round():
    """Round 1 ran on a machine half as fast: the speeds spread, the ratios do not."""
    runs = [
        *(measured(PLAIN, 0, 0, 10), measured(PLAIN, 0, 1, 20), measured(PLAIN, 1, 0, 5), measured(PLAIN, 1, 1, 10)),
        *(measured(AUTO, 1, 1, 20), measured(AUTO, 1, 0, 10), measured(AUTO, 0, 1, 40), measured(AUTO, 0, 0, 20)),
    ]
    assert ratio(runs, AUTO, PLAIN) == Spread(*[pytest.approx(2)] * 3)
    assert speed(runs, PLAIN).median == pytest.approx(10)
    assert speed(runs, PLAIN, prompt=1).median == pytest.approx(15)
    assert ratio(runs, AUTO, PLAIN, prompt=1).median == pytest.approx(2)


def test_answers_are_those_of_the_mode():
    runs = [measured(PLAIN, 0, 0, 10), measured(OFF, 0, 0, 11), measured(OFF, 0, 1, 12)]
    assert answers(runs, OFF) == [runs[1].answer, runs[2].answer]
    assert answers(runs, OFF, prompt=1) == [runs[2].answer]


def test_accept_length_pools_the_counts():
    assert accept_length([Answer("a", 30, 2.0, 10, 29), Answer("b", 10, 0.5, 10, 9)]) == 1.9
    assert accept_length([Answer("a", 30, 2.0, 0, 0)]) is None


@pytest.mark.parametrize(
    ("left", "right", "index"), [("ab", "ab", None), ("ab", "ac", 1), ("ab", "abc", 2), ("", "", None)]
)
def test_first_difference(left, right, index):
    assert first_difference(left, right) == index
