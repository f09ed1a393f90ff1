"""The rules that read this step's confidences on the host: early stop and threshold."""

import itertools

import numpy as np
import pytest
import torch

from sglang_dspark.step.selection import above_threshold, early_stop, top_prefixes


def algorithm_1(survival, sps):
    """DSpark's Algorithm 1, line by line (DSpark, 3.2.2); ``sps[B]`` is indexed by verified tokens."""
    num_requests, gamma = survival.shape
    cells = itertools.product(range(num_requests), range(gamma))
    candidates = sorted(
        ((r, j) for r, j in cells if survival[r, j] > 0), key=lambda cell: (-survival[cell], cell[1], cell[0])
    )
    lens = [0] * num_requests
    best_lens, tokens, tau = list(lens), num_requests, float(num_requests)
    best = num_requests * sps[num_requests]
    for r, j in candidates:
        lens[r] = j + 1
        tokens += 1
        tau += survival[r, j]
        theta = tau * sps[tokens]
        if theta > best:
            best, best_lens = theta, list(lens)
        else:
            break
    return best_lens


def throughput(survival, step_ms, lens):
    expected = sum(1 + survival[r, :n].sum() for r, n in enumerate(lens))
    return expected / step_ms[sum(lens)]


def global_optimum(survival, step_ms):
    bs, gamma = survival.shape
    return max(throughput(survival, step_ms, lens) for lens in itertools.product(range(gamma + 1), repeat=bs))


def random_survival(rng):
    shape = rng.integers(1, 4), rng.integers(1, 5)
    factors = [(0.5, 1.0), (0.0, 0.5, 1.0), (0.9, 0.95, 1.0), None][rng.integers(4)]
    return (rng.random(shape) if factors is None else rng.choice(factors, size=shape)).cumprod(1)


def convex_ms(rng, size):
    """Rising ever steeper, so that throughput along the path has a single peak."""
    return 5 + np.sort(rng.random(size)).cumsum() * rng.choice([0.1, 1.0, 5.0])


def jagged_ms(rng, size):
    """A staircase, as graph tiers make it."""
    return 5 + np.repeat(rng.random(size) * 4, 2)[:size].cumsum()


@pytest.mark.parametrize("shape", [convex_ms, jagged_ms])
def test_early_stop_is_algorithm_1(shape):
    rng = np.random.default_rng(0)
    stopped_early = 0
    for _ in range(2000):
        survival = random_survival(rng)
        step_ms = shape(rng, survival.size + 1)
        lens = early_stop(survival, step_ms)
        assert lens == algorithm_1(survival, dict(enumerate(1 / step_ms, start=len(survival))))
        stopped_early += 0 < sum(lens) < survival.size
    assert stopped_early > 500


def test_early_stop_does_not_look_past_a_cliff():
    """That is its price for being exact on live values: at the second step of the stairs it is too late."""
    survival, step_ms = np.array([[0.9, 0.9, 0.9]]), np.array([1.0, 2.0, 2.0, 2.0])
    assert early_stop(survival, step_ms) == [0]
    assert global_optimum(survival, step_ms) > throughput(survival, step_ms, [0]) * 1.8


def test_an_equal_throughput_is_no_reason_to_go_on():
    assert early_stop(np.array([[1.0, 1.0]]), np.array([1.0, 2.0, 2.5])) == [0]


def test_the_threshold_cuts_at_the_first_confidence_below_it():
    confidence = torch.tensor([[0.9, 0.5, 0.9], [0.5, 0.9, 0.9], [0.49, 1.0, 1.0], [0.6, 0.7, 0.8]])
    assert above_threshold(confidence, 0.5).tolist() == [3, 3, 0, 3]
    assert above_threshold(confidence, 0.55).tolist() == [1, 0, 0, 3]
    assert above_threshold(confidence, 0.0).tolist() == [3, 3, 3, 3]
    assert above_threshold(confidence, 1.0).tolist() == [0, 0, 0, 0]
    assert above_threshold(confidence[:, :0], 0.5).tolist() == [0, 0, 0, 0]


def test_a_confidence_that_is_no_number_is_below_every_threshold():
    assert above_threshold(torch.tensor([[float("nan"), 1.0], [1.0, float("nan")]]), 0.0).tolist() == [0, 1]


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
