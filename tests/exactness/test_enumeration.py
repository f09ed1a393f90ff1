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
from stage_loop import NO_CHAINS
from switches import SWITCHES
from target_distribution import (
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
    half_of,
    half_of_all,
    one_of_three,
    one_of_two,
    paced,
    third_of,
)
from toy_pair import GAMMA, ToyLoop, toy_drafter

pytestmark = pytest.mark.slow

KINDS = {"compete": COMPETING, "copy": COPYING}
TOP_K = {"filters": FILTERS["top-k"]}
ONE_DRAFT, REDUCED = {"block_size": 1}, SWITCHES["reduced vocabulary, gated"]
BESIDE = {"requests": 3, "bounds": (NO_CHAINS, COPYING, NO_CHAINS), **TOP_K}
RARE: set[str] = set()  # for `make thorough`


def cases():
    """Yield name, options of the schedule, tokens of the text, the rest, and the switches of another drafter."""
    for policy, options in POLICIES.items():
        # The second round draws again what the first one did not verify.
        yield f"two rounds, {policy}", options, 2, {}, None
    for choose in (half_of, one_of_two, bounded):
        # Their joint distribution: neither may know of the other.
        yield f"two requests, {choose.__name__}", {}, 1, {"requests": 2, "choose": choose}, None
    # What one request has been sent decides about the other one's drafts, too.
    yield "two requests, paced", {}, 2, {"requests": 2, "choose": paced, **TOP_K}, None
    RARE.add("two requests, paced")
    for choose in (third_of, one_of_three, all_but_the_first):
        # The middle one copies; two tokens of three are left, which spares most of the runs.
        yield f"three requests, {choose.__name__}", {}, 1, BESIDE | {"choose": choose}, None
        RARE.add(f"three requests, {choose.__name__}")
    for name, switches in SWITCHES.items():
        # The whole block is verified, so that each of its drafts and of its stored distributions counts.
        yield f"network, {name}", STATIC, 2, {}, switches
        RARE.add(f"network, {name}")
    # What says how sure a selector is chooses the drafts, too.
    yield "a selector, threshold", POLICIES["threshold"], 2, {}, SWITCHES["DFlash 2"]
    yield "a selector, early-stop", POLICIES["early-stop"], 2, {}, SWITCHES["DFlash 2"]
    RARE.add("a selector, threshold")
    RARE.difference_update(f"network, {name}" for name in ("DFlash", "reduced vocabulary, gated", "everything"))
    for (policy, options), name in zip(POLICIES.items(), itertools.cycle(FILTERS), strict=False):
        yield f"filter {name}, {policy}", options, 1, {"filters": FILTERS[name]}, None
    for (policy, options), name in zip(POLICIES.items(), itertools.cycle(PENALTIES), strict=False):
        # A second round counts what the first one has committed, and a row the drafts before it.
        yield f"penalty {name}, {policy}", options, 2, TOP_K | {"adjustment": PENALTIES[name]}, None
        RARE.update({f"penalty {name}, {policy}"} - {f"penalty all, {policy}"})
    for kind, bounds in KINDS.items():
        # Chains of the text's own tokens weigh something in the walk, or all there is, die in it, and ask for rows.
        for policy, options in POLICIES.items():
            yield f"candidates {kind}, {policy}", options, 2, {"bounds": [bounds]}, None
            RARE.update({f"candidates {kind}, {policy}"} - {f"candidates {kind}, static"})
        everything = TOP_K | {"bounds": [bounds], "adjustment": PENALTIES["all"]}
        yield f"candidates {kind}, penalties and filters", {}, 2, everything, None
        # Some are copied outright, others are left.
        yield f"candidates {kind}, without a column", STATIC, 2, {"bounds": [bounds]}, REDUCED
        longer = 2 if bounds is COPYING else 3
        yield (
            f"candidates {kind}, longer blocks",
            STATIC,
            longer,
            TOP_K | {"bounds": [bounds]},
            {"block_size": GAMMA + 1},
        )
        for policy in ("auto", "static"):
            # One draft is drawn, and up to two after it are copied.
            options = POLICIES[policy] | {"block_size": 3}
            yield f"candidates {kind}, after the block, {policy}", options, 3, {"bounds": [bounds]}, ONE_DRAFT
    RARE.update(("candidates compete, after the block, static", "candidates copy, after the block, auto"))
    RARE.update(f"candidates {kind}, longer blocks" for kind in ("compete", "copy"))
    both = {"requests": 2, "bounds": [COMPETING, COPYING]}
    # One draft of two is verified, and its chain speaks for it.
    yield "two requests with candidates", {}, 1, both | {"choose": half_of}, None
    # The request whose chain is alive there has its tail verified.
    yield "two requests, after their blocks", {"block_size": 2}, 1, both | {"choose": half_of_all}, ONE_DRAFT
    for rows in (CACHED_ROWS, ASKED_ROWS):
        # It goes on where the text ends with 0, or with 2 and 1; what it was asked for is copied in any case.
        parts = [-1, 0, 2, -1, 2, 1, 1, -1], [9, 1, 9, 9, 1, 2, 9, 9], [rows] * 8, [0] * 8
        second = SecondTexts(*torch.tensor(parts))
        yield f"a second text, {rows}", STATIC, 2, {"bounds": [COMPETING], "second": second}, None
    RARE.update(f"two rounds, {policy}" for policy in ("early-stop", "static", "threshold"))
    RARE.update((f"a second text, {CACHED_ROWS}", "two requests, after their blocks"))
    for length in (1, 2):
        # One candidate or two, or none.
        yield f"no drafter, {length}", {"draft_free": True}, 2, {"bounds": [(2, 3, length, COPYING[3])]}, None


CASES = {name: case for name, *case in cases()}


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.thorough) if name in RARE else name for name in CASES]
)
def test_the_text_has_the_targets_distribution(monkeypatch, name):
    options, length, how, switches = CASES[name]
    drafter = None if switches is None else toy_drafter(switches)
    tolerance = 2e-7 if "adjustment" in how else 1e-9  # penalties are float32
    assert distribution_error(monkeypatch, options, length, drafter=drafter, **how) < tolerance


def test_nothing_is_copied_without_a_drafter_that_no_preset_asked_for():
    loop = ToyLoop(draft_free=True)
    for bounds, copies in ((COMPETING, False), (COPYING, True)):
        loop.bounds = [bounds]
        loop.serve([ALL_TOKENS], 8)
        assert any(kept for *_, kept in loop.traces[0]) == copies
