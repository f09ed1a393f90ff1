"""The distribution of the output, by going through every outcome of the noise: no sampling, so no error of sampling.

A toy pair is decoded by the served stages: policy, drafter, Markov walk, plan, acceptance, commit. Every random number
takes every value that makes a difference, and the probabilities of the runs add up to the distribution of the text,
which has to be the target's. Planted leaks (`test_leaks.py`) show that a wrong distribution is found.
"""

from __future__ import annotations

import itertools

import pytest
from enumerated_distribution import (
    FILTERS,
    PENALTIES,
    POLICIES,
    STATIC,
    a_copy_between,
    bounded,
    copies,
    distribution_error,
    half_of,
    one_of_three,
    one_of_two,
    third_of,
)
from switches import SWITCHES
from toy_pair import V, toy_drafter

pytestmark = pytest.mark.slow

QUICK = ("DFlash", "reduced vocabulary, gated", "everything")
TOLERANCE = 2e-7  # the served distributions are float32, and so is the difference of two of them


@pytest.mark.parametrize("policy", POLICIES)
def test_two_rounds_of_one_request(monkeypatch, policy):
    """The second round draws again what the first one did not verify."""
    assert distribution_error(monkeypatch, POLICIES[policy], 2) < TOLERANCE


@pytest.mark.parametrize("choose", [half_of, one_of_two, bounded])
def test_two_requests_that_share_a_step(monkeypatch, choose):
    """Their joint distribution: neither may know of the other."""
    assert distribution_error(monkeypatch, {}, 1, requests=2, choose=choose) < TOLERANCE


@pytest.mark.thorough
@pytest.mark.parametrize("choose", [third_of, one_of_three, a_copy_between])
def test_three_requests_that_share_a_step(monkeypatch, choose):
    copied = {"copied_after": lambda request, text: [2] * (request == 1)} if choose is a_copy_between else {}
    # Two tokens of three are left, which spares most of the runs.
    assert (
        distribution_error(monkeypatch, {}, 1, requests=3, choose=choose, filters=FILTERS["top-k"], **copied)
        < TOLERANCE
    )


@pytest.mark.parametrize(
    "switch", [switch if switch in QUICK else pytest.param(switch, marks=pytest.mark.thorough) for switch in SWITCHES]
)
def test_distribution_with_switches_of_the_network(monkeypatch, switch):
    """The whole block is verified, so that each of its drafts and of its stored distributions counts."""
    drafter = toy_drafter(SWITCHES[switch])
    assert distribution_error(monkeypatch, STATIC, 2, drafter=drafter) < TOLERANCE


@pytest.mark.parametrize(("policy", "filters"), zip(POLICIES, itertools.cycle(FILTERS), strict=False))
def test_distribution_under_filters(monkeypatch, policy, filters):
    assert distribution_error(monkeypatch, POLICIES[policy], 1, filters=FILTERS[filters]) < TOLERANCE


@pytest.mark.parametrize(("policy", "penalty"), zip(POLICIES, itertools.cycle(PENALTIES), strict=False))
def test_distribution_under_penalties(monkeypatch, policy, penalty):
    """A second round counts what the first one has committed, and a row the drafts before it."""
    how = {"adjustment": PENALTIES[penalty], "filters": FILTERS["top-k"]}
    assert distribution_error(monkeypatch, POLICIES[policy], 2, **how) < TOLERANCE


@pytest.mark.parametrize("policy", POLICIES)
def test_distribution_with_candidates(monkeypatch, policy):
    """Chains of the text's own tokens weigh something in the walk, die in it, and ask for rows."""
    assert distribution_error(monkeypatch, POLICIES[policy], 2, candidates=True) < TOLERANCE


def test_two_requests_with_candidates_share_a_step(monkeypatch):
    """One draft of two is verified, and its chain speaks for it."""
    assert distribution_error(monkeypatch, {}, 1, requests=2, choose=half_of, candidates=True) < TOLERANCE


def test_distribution_with_candidates_penalties_and_filters(monkeypatch):
    how = {"candidates": True, "adjustment": PENALTIES["all"], "filters": FILTERS["top-k"]}
    assert distribution_error(monkeypatch, {}, 2, **how) < TOLERANCE


def test_distribution_with_candidates_that_no_column_stands_for(monkeypatch):
    """Some are copied outright, others are left."""
    drafter = toy_drafter(SWITCHES["reduced vocabulary, gated"])
    assert distribution_error(monkeypatch, STATIC, 2, drafter=drafter, candidates=True) < TOLERANCE


@pytest.mark.parametrize("policy", POLICIES)
def test_distribution_with_copied_drafts(monkeypatch, policy):
    """Copied drafts take the place of the drafter's in some steps of a text."""
    found = {len(copies(0, [token])) for token in range(V)}
    assert found == {0, 1, 2}
    assert distribution_error(monkeypatch, POLICIES[policy], 2, copied_after=copies) < TOLERANCE


def test_distribution_with_copied_drafts_penalties_and_filters(monkeypatch):
    how = {"copied_after": copies, "adjustment": PENALTIES["all"], "filters": FILTERS["top-k"]}
    assert distribution_error(monkeypatch, {}, 2, **how) < TOLERANCE
