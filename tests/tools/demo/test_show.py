"""The order of a demo's questions, and what it makes of the answers."""

import io
import itertools
import math
from pathlib import Path

import pytest
from rich.console import Console

from sglang_dspark.tools import demo
from sglang_dspark.tools.demo import AUTO, OFF, PLAIN, Answer, Demo


def test_ways_take_turns_in_changing_order_right_after_each_other(monkeypatch):
    options = {"prompts": ["a", "b"], "max_tokens": 8, "rounds": 4, "dtype": "float32", "log_dir": Path()}
    demo = Demo(Console(file=io.StringIO()), Path(), Path(), **options)
    asked = []
    monkeypatch.setattr(Demo, "_ask", lambda self, server, prompt, policy: asked.append((prompt, policy)))
    demo._measure(dict.fromkeys((PLAIN, OFF, AUTO)))
    first, turns = asked[:3], asked[3:]
    assert first == [("a", None), ("a", "off"), ("a", "auto")]
    groups = [turns[i : i + 3] for i in range(0, len(turns), 3)]
    assert [{prompt for prompt, _ in group} for group in groups] == [{"a"}, {"b"}] * 4
    assert all({policy for _, policy in group} == {None, "off", "auto"} for group in groups)
    followers = {(before[1], after[1]) for before, after in itertools.pairwise(turns)}
    assert {(a, b) for a, b in itertools.permutations((None, "off", "auto"), 2)} <= followers


def test_a_ratio_pairs_the_same_prompt_in_the_same_round():
    """The second round ran on a machine half as fast: the ratios do not spread."""
    speeds = [[10, 5], [20, 10]], [[20, 10], [40, 20]]
    plain, auto = ([[Answer("text", s, 10, 25) for s in rounds] for rounds in way] for way in speeds)
    assert demo._ratios(auto, plain) == pytest.approx([2] * 2)


def test_the_interval_is_that_of_the_geometric_mean_over_prompts():
    """The logarithms of 2 and 8 are 1 and 3 in twos: 2 with an error of 1, and Student's t is 12.7 there."""
    assert demo._with_interval([2.0, 8.0]) == "4.00 (0.00 to 26730.60)"
    assert demo._with_interval([1.5]) == "1.50"


def test_accept_length_pools_the_counts():
    assert demo._accept_length([[Answer("a", 30, 10, 29)], [Answer("b", 10, 10, 9)]]) == 1.9
    assert math.isnan(demo._accept_length([[Answer("a", 30, 0, 0)]]))
