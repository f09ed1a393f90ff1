"""The drafts that fill a budget: the best there are, with their predecessors, chosen without a look at their value."""

import itertools

import numpy as np
import pytest
import torch

from sglang_dspark.step.selected import top_prefixes

NUM_INSTANCES = 2000
FORCED, EXCLUDED = 2.0, -1.0  # as step/selection.py marks them


def random_survivals(rng, most_requests=4, most_drafts=4):
    """[bs, gamma] running products; often of a few equal factors, so that ties abound."""
    shape = rng.integers(1, most_requests + 1), rng.integers(1, most_drafts + 1)
    factors = [(0.5, 1.0), (0.0, 0.5, 1.0), (1.0,), None][rng.integers(4)]
    conditional = rng.random(shape) if factors is None else rng.choice(factors, size=shape)
    return conditional.cumprod(1).astype(np.float32)


def instances(seed=0, count=NUM_INSTANCES):
    rng = np.random.default_rng(seed)
    for _ in range(count):
        survival = random_survivals(rng)
        yield rng, survival, int(rng.integers(survival.size + 1))


def admit(survival, budget):
    return top_prefixes(torch.from_numpy(survival), budget).tolist()


def ranked(survival):
    """All drafts (r, j), best first, ties by position and then by request."""
    cells = itertools.product(range(survival.shape[0]), range(survival.shape[1]))
    return sorted(cells, key=lambda cell: (-survival[cell], cell[1], cell[0]))


def test_ties_go_to_the_smaller_position_and_then_to_the_smaller_request():
    for _, survival, budget in instances():
        admitted = ranked(survival)[:budget]
        lens = admit(survival, budget)
        assert sorted(admitted) == [(r, j) for r, n in enumerate(lens) for j in range(n)]
        assert lens == admit(survival, budget)


def test_a_forced_request_is_verified_whole_and_the_rest_fills_up():
    for rng, survival, _ in instances(seed=4):
        bs, gamma = survival.shape
        forced = int(rng.integers(bs))
        budget = gamma + int(rng.integers((bs - 1) * gamma + 1))
        marked = survival.copy()
        marked[forced] = FORCED
        lens = admit(marked, budget)
        assert lens[forced] == gamma
        others = [r for r in range(bs) if r != forced]
        if others:
            assert [lens[r] for r in others] == admit(survival[others], budget - gamma)


def test_a_forced_block_may_be_cut_by_the_budget():
    assert admit(np.full((1, 4), FORCED, dtype=np.float32), 3) == [3]


@pytest.mark.parametrize("budget", [0, 2, 3, 5, 9])
def test_excluded_requests_are_not_verified(budget):
    survival = np.full((3, 3), EXCLUDED, dtype=np.float32)
    survival[1] = FORCED
    assert admit(survival, budget) == [0, min(budget, 3), 0]
