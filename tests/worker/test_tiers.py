"""Shapes that decode steps are captured in."""

import numpy as np
import pytest

from sglang_dspark.scheduling.sps_table import LoadTimes, SpsTable
from sglang_dspark.worker.buffers import MAX_SAMPLED, MAX_TOKENS, Tiers, at_least

SLOTS = [1, 2, 4, 8, 12, 16, 24, 32, 40, 64]


def test_a_step_takes_the_smallest_tier_with_room():
    tiers = Tiers.of(SLOTS, 7)
    assert [at_least(tiers.requests, n) for n in (1, 3, 9, 64)] == [1, 4, 12, 64]
    assert at_least(tiers.requests, 65) is None
    assert [at_least(tiers.tokens, n) for n in (2, 16, 17, 511)] == [2, 16, 18, 512]
    assert at_least(tiers.tokens, 513) is None


def test_sampled_drafts_have_fewer_tiers():
    tiers = Tiers.of(SLOTS, 7)
    assert [at_least(tiers.sampled, n) for n in (1, 9, MAX_SAMPLED)] == [1, 16, 32]
    assert at_least(tiers.sampled, MAX_SAMPLED + 1) is None


@pytest.mark.parametrize("max_verify", [1, 5, 16])
def test_at_most_an_eighth_of_a_tier_is_padding(max_verify):
    tiers = Tiers.of([1, 256], max_verify)
    assert tiers.tokens[0] == 2
    assert tiers.tokens[-1] == min(256 * (max_verify + 1), MAX_TOKENS)
    for rows in range(2, tiers.tokens[-1] + 1):
        tier = at_least(tiers.tokens, rows)
        assert tier is not None
        assert tier - rows <= rows / 8


def test_a_server_that_never_verifies_has_plain_steps_only():
    assert Tiers.of([1, 2], 0) == Tiers((1, 2), (1, 2), ())


@pytest.mark.parametrize("requests", [1, 2, 16])
def test_plain_steps_have_times_of_their_own(requests):
    """Not those of a step that verifies a draft."""
    verify_ms = 10.0 + np.arange(8.0)[None, :, None]
    table = SpsTable({}, [1], range(8), [64], np.zeros((1, 8, 1)), verify_ms, Tiers.of([1, 2, 16], 7).timed)
    times = LoadTimes.of(table, requests)
    assert (times.num_tokens[0], times.drafts[0]) == (requests, 0)
    assert times.at(64)[0, 0] == 10.0
