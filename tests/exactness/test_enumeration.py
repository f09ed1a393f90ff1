"""The distribution of the output, by going through every outcome of the noise: no sampling, so no error of sampling.

A toy pair is decoded by the served stages: policy, drafter, Markov walk, plan, acceptance, commit. Every random number
takes every value that makes a difference, and the probabilities of the runs add up to the distribution of the text,
which has to be the target's. Planted leaks (`test_leaks.py`) show that a wrong distribution is found.
"""

from __future__ import annotations

import itertools

import pytest
import torch
from dspark_kernels import ASKED_ROWS, CACHED_ROWS, SecondTexts
from enumerated_distribution import (
    ALL_TOKENS,
    COMPETING,
    COPYING,
    FILTERS,
    PENALTIES,
    POLICIES,
    STATIC,
    all_but_the_first,
    bounded,
    distribution_error,
    drafter_of_longer_blocks,
    half_of,
    half_of_all,
    one_of_three,
    one_of_two,
    third_of,
)
from stage_loop import NO_CHAINS
from switches import SWITCHES
from toy_pair import ToyLoop, toy_drafter

pytestmark = pytest.mark.slow

KINDS = [COMPETING, COPYING]
QUICK = ("DFlash", "reduced vocabulary, gated", "everything")
TOLERANCE = 1e-9
ROUNDED = 2e-7  # penalties are float32


def rarely(case):
    """A case for ``make thorough``."""
    return pytest.param(case, marks=pytest.mark.thorough)


@pytest.mark.parametrize("policy", POLICIES)
def test_two_rounds_of_one_request(monkeypatch, policy):
    """The second round draws again what the first one did not verify."""
    assert distribution_error(monkeypatch, POLICIES[policy], 2) < TOLERANCE


@pytest.mark.parametrize("choose", [half_of, one_of_two, bounded])
def test_two_requests_that_share_a_step(monkeypatch, choose):
    """Their joint distribution: neither may know of the other."""
    assert distribution_error(monkeypatch, {}, 1, requests=2, choose=choose) < TOLERANCE


@pytest.mark.thorough
@pytest.mark.parametrize("choose", [third_of, one_of_three, all_but_the_first])
def test_three_requests_that_share_a_step(monkeypatch, choose):
    """The middle one copies; two tokens of three are left, which spares most of the runs."""
    how = {"requests": 3, "choose": choose, "filters": FILTERS["top-k"], "bounds": (NO_CHAINS, COPYING, NO_CHAINS)}
    assert distribution_error(monkeypatch, {}, 1, **how) < TOLERANCE


@pytest.mark.parametrize("switch", [switch if switch in QUICK else rarely(switch) for switch in SWITCHES])
def test_distribution_with_switches_of_the_network(monkeypatch, switch):
    """The whole block is verified, so that each of its drafts and of its stored distributions counts."""
    drafter = toy_drafter(SWITCHES[switch])
    assert distribution_error(monkeypatch, STATIC, 2, drafter=drafter) < TOLERANCE


@pytest.mark.parametrize(("policy", "filters"), zip(POLICIES, itertools.cycle(FILTERS), strict=False))
def test_distribution_under_filters(monkeypatch, policy, filters):
    assert distribution_error(monkeypatch, POLICIES[policy], 1, filters=FILTERS[filters]) < TOLERANCE


@pytest.mark.parametrize(
    ("policy", "penalty"),
    [
        pytest.param(policy, penalty, marks=[] if penalty == "all" else pytest.mark.thorough)
        for policy, penalty in zip(POLICIES, itertools.cycle(PENALTIES), strict=False)
    ],
)
def test_distribution_under_penalties(monkeypatch, policy, penalty):
    """A second round counts what the first one has committed, and a row the drafts before it."""
    how = {"adjustment": PENALTIES[penalty], "filters": FILTERS["top-k"]}
    assert distribution_error(monkeypatch, POLICIES[policy], 2, **how) < ROUNDED


@pytest.mark.parametrize("bounds", KINDS, ids=["compete", "copy"])
@pytest.mark.parametrize("policy", [name if name == "static" else rarely(name) for name in POLICIES])
def test_distribution_with_candidates(monkeypatch, policy, bounds):
    """Chains of the text's own tokens weigh something in the walk, or all there is, die in it, and ask for rows."""
    assert distribution_error(monkeypatch, POLICIES[policy], 2, bounds=[bounds]) < TOLERANCE


def test_two_requests_with_candidates_share_a_step(monkeypatch):
    """One draft of two is verified, and its chain speaks for it."""
    how = {"requests": 2, "choose": half_of, "bounds": [COMPETING, COPYING]}
    assert distribution_error(monkeypatch, {}, 1, **how) < TOLERANCE


@pytest.mark.parametrize("bounds", KINDS, ids=["compete", "copy"])
def test_distribution_with_candidates_penalties_and_filters(monkeypatch, bounds):
    how = {"bounds": [bounds], "adjustment": PENALTIES["all"], "filters": FILTERS["top-k"]}
    assert distribution_error(monkeypatch, {}, 2, **how) < ROUNDED


@pytest.mark.parametrize("bounds", KINDS, ids=["compete", "copy"])
def test_distribution_with_candidates_that_no_column_stands_for(monkeypatch, bounds):
    """Some are copied outright, others are left."""
    drafter = toy_drafter(SWITCHES["reduced vocabulary, gated"])
    assert distribution_error(monkeypatch, STATIC, 2, drafter=drafter, bounds=[bounds]) < TOLERANCE


@pytest.mark.parametrize("bounds", [rarely(COMPETING), COPYING], ids=["compete", "copy"])
def test_distribution_with_candidates_in_longer_blocks(monkeypatch, bounds):
    """Two tokens of three are left, which spares most of the runs."""
    how = {"drafter": drafter_of_longer_blocks(), "bounds": [bounds], "filters": FILTERS["top-k"]}
    assert distribution_error(monkeypatch, STATIC, 2 if bounds is COPYING else 3, **how) < TOLERANCE


@pytest.mark.parametrize("rows", [CACHED_ROWS, ASKED_ROWS], ids=["compete", "copy"])
def test_distribution_with_a_second_text(monkeypatch, rows):
    """It goes on where the text ends with 0, or with 2 and 1; what it was asked for is copied in any case."""
    parts = [-1, 0, 2, -1, 2, 1, 1, -1], [9, 1, 9, 9, 1, 2, 9, 9], [rows] * 8, [0] * 8
    second = SecondTexts(*torch.tensor(parts))
    assert distribution_error(monkeypatch, STATIC, 2, bounds=[COMPETING], second=second) < TOLERANCE


@pytest.mark.parametrize("bounds", [COMPETING, COPYING], ids=["compete", "copy"])
@pytest.mark.parametrize("policy", ["auto", "static"])
def test_distribution_with_candidates_behind_the_drafters_block(monkeypatch, policy, bounds):
    """One draft is drawn, and up to two behind it are copied."""
    options = POLICIES[policy] | {"block_size": 3}
    how = {"drafter": toy_drafter({"block_size": 1}), "bounds": [bounds]}
    assert distribution_error(monkeypatch, options, 3, **how) < TOLERANCE


def test_two_requests_with_candidates_behind_the_drafters_blocks(monkeypatch):
    """The request whose chain is alive there has its tail verified."""
    how = {"requests": 2, "choose": half_of_all, "bounds": [COMPETING, COPYING]}
    how["drafter"] = toy_drafter({"block_size": 1})
    assert distribution_error(monkeypatch, {"block_size": 2}, 1, **how) < TOLERANCE


def test_nothing_is_copied_without_a_drafter_that_no_preset_asked_for():
    loop = ToyLoop(draft_free=True)
    for bounds, copies in ((COMPETING, False), (COPYING, True)):
        loop.bounds = [bounds]
        loop.serve([ALL_TOKENS], 8)
        assert any(kept for *_, kept in loop.traces[0]) == copies


@pytest.mark.parametrize("length", [1, 2])
def test_distribution_without_a_drafter(monkeypatch, length):
    """One candidate or two, or none."""
    bounds = [(2, 3, length, COPYING[3])]
    assert distribution_error(monkeypatch, {"draft_free": True}, 2, bounds=bounds) < TOLERANCE
