"""Costs that a sweep itself gives, on the committed sweep of an H200."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from sglang_dspark.errors import ConfigError
from sglang_dspark.tools.simulator.blocks import RecordedBlocks
from sglang_dspark.tools.simulator.check import compare_alone, rank_correlations
from sglang_dspark.tools.simulator.measured_sweep import read_sweep
from sglang_dspark.tools.simulator.sweep_costs import blocks_of, costs_of, table_of

RESULTS = Path(__file__).parents[3] / "benchmarks" / "results"
BLOCKS = RESULTS / "evaluation" / "blocks.jsonl"


@pytest.fixture(scope="module")
def points():
    return read_sweep(RESULTS / "h200" / "sweep" / "sweep.csv")


def around(number):
    return int(np.floor(number)), int(np.ceil(number))


def test_steps_of_fixed_lengths_take_what_they_took(points):
    """At the requests that ran on average: fewer than there are users where requests end apart."""
    table = table_of(points)
    for point in points:
        drafts = point.fixed_len
        if drafts is None:
            continue
        mean_ms = point.tpot_ms * point.accept_length if point.users == 1 or drafts == 0 else point.step_ms
        near = [table.step_ms(running, running * (1 + drafts), drafts, 150) for running in around(point.running)]
        assert 1 <= point.running <= point.users
        assert min(near) * 0.93 <= mean_ms <= max(near) * 1.07
    assert next(p.running for p in points if p.label == "static:5" and p.users == 64) < 50


def test_a_step_with_few_drafts_takes_as_long_as_one_with_the_fewest_measured(points):
    table = table_of(points)
    plain, one, five = (table.step_ms(16, 16 * (1 + drafts), drafts, 150) for drafts in (0, 1, 5))
    assert plain < one == five


def test_times_of_the_loop_are_those_that_the_streams_show(points):
    """A prefill of one prompt interrupts others for 13 ms there, and 0.8 ms more for each that comes with it."""
    costs, transit_ms = costs_of(points, table_of(points), 0.0)
    plain = next(p for p in points if p.policy == "plain" and p.users == 1)
    assert costs.prefill.ms(plain.prompt_tokens) == pytest.approx(13, abs=1)
    assert costs.prefill.token_ms * plain.prompt_tokens == pytest.approx(0.8, abs=0.1)
    assert transit_ms + costs.prefill.ms(plain.prompt_tokens) + plain.tpot_ms == pytest.approx(plain.ttft_ms)
    assert 0 < costs.decision_ms < 0.3


def test_blocks_accept_as_many_drafts_as_in_the_sweep(points):
    even, recorded = (blocks_of(points, 5, blocks) for blocks in (None, RecordedBlocks.load(BLOCKS)))
    for point in points:
        if point.fixed_len == 5:
            _, accepted = even[point.users].draw(list(range(6000)), np.random.default_rng(0))
            assert accepted.mean() == pytest.approx(point.accepted_per_round, abs=0.07)
            assert recorded[point.users].accepted.mean() == pytest.approx(point.accepted_per_round, abs=0.05)


def test_blocks_of_a_weaker_drafter_know_that_they_are():
    blocks = RecordedBlocks.load(BLOCKS)
    weaker = blocks.accepting(0.8)
    assert weaker.accepted.mean() == pytest.approx(0.8, abs=0.05)
    assert (weaker.accepted <= blocks.accepted).all()
    assert (weaker.logits < blocks.logits).all()
    with pytest.raises(ConfigError, match="give blocks of a drafter as good"):
        blocks.accepting(3.0)


@pytest.mark.parametrize("label", ["off", "static:5", "plain"])
def test_a_sweep_that_lacks_what_times_are_taken_from(points, label):
    rest = [point for point in points if point.label != label]
    with pytest.raises(ConfigError, match="--check without --table"):
        costs_of(rest, table_of(rest), 0.0)


def test_a_load_without_the_longest_length(points):
    rest = [point for point in points if point.label != "static:5" or point.users != 4]
    with pytest.raises(ConfigError, match=r"no static:5 at \[4\] users"):
        blocks_of(rest, 5, None)


def test_a_sweep_of_one_load_says_nothing_about_prefills(points):
    alone = [replace(point) for point in points if point.users == 1]
    with pytest.raises(ConfigError, match="several loads"):
        costs_of(alone, table_of(alone), 0.0)


@pytest.mark.thorough
def test_the_sweep_is_reproduced(points):
    """Speeds within 10 %, and the order of the policies at every load, with nothing fitted to them."""
    comparisons = compare_alone(points, RecordedBlocks.load(BLOCKS))
    missed = {(c.measured.users, c.measured.label): c.error for c in comparisons if abs(c.error) > 0.1}
    assert missed == {}
    assert list(rank_correlations(comparisons).values()) == pytest.approx([1.0] * 4)
    for c in comparisons:
        if c.measured.decides:
            assert c.verify_len == pytest.approx(c.measured.verify_len, rel=0.15)
            assert c.accept_length == pytest.approx(c.measured.accept_length, rel=0.1)
