"""The crossover model against its own definition."""

import pytest

from sglang_dspark.tools.simulator.sweep import CrossoverModel


@pytest.mark.parametrize("first", [0.5, 0.7, 0.9])
@pytest.mark.parametrize("block", [1, 5, 7])
def test_whole_blocks_lose_from_the_crossover_on(first, block):
    model = CrossoverModel(first, 0.95, block, capacity=1000)

    def gain(users):
        return model.point("fixed", users).user_speed / model.point("plain", users).user_speed

    users = int(model.crossover)
    assert gain(users) >= 1 > gain(users + 1)
    assert gain(1) == pytest.approx(model.point("fixed", 1).accept_length)


def test_the_schedule_is_never_behind_and_verifies_less_and_less():
    model = CrossoverModel()
    lengths = []
    for users in range(1, 400):
        points = {policy: model.point(policy, users) for policy in ("plain", "fixed", "scheduled")}
        assert points["scheduled"].user_speed >= max(points["plain"].user_speed, points["fixed"].user_speed) - 1e-12
        lengths.append(points["scheduled"].verify_len)
    assert lengths == sorted(lengths, reverse=True)
    assert (lengths[0], lengths[-1]) == (7, 0)


def test_waste_by_hand():
    point = CrossoverModel(0.5, 1.0, 2, 100).point("fixed", 1)
    assert (point.accept_length, point.wasted) == pytest.approx((1.75, 1 - 0.75 / 2))
