"""The order in which prompts start, beside what it says of itself."""

import random
from math import inf

import pytest

from sglang_dspark.scheduling.first_tokens import starting_order


def literally(due, promised):
    """Without a promise, a prompt is due with the oldest such prompt behind it."""
    others = {place: key for place, key in enumerate(due) if place not in promised}
    by = {place: min(key for other, key in others.items() if other >= place) for place in others} | promised
    return sorted(range(len(due)), key=by.__getitem__)


@pytest.mark.parametrize("by_age", [False, True])
@pytest.mark.parametrize("levels", [1, 3])
def test_promised_prompts_go_between_others_that_keep_their_order(by_age, levels):
    rng = random.Random(1)
    for _ in range(300):
        waiting = rng.randrange(12)
        due = [(rng.randrange(levels), rng.random()) for _ in range(waiting)]
        due.sort(key=lambda one: one if by_age else one[0])
        places = sorted(rng.sample(range(waiting), rng.randint(0, waiting)))
        promised = {place: (due[place][0], rng.choice([-inf, rng.random()])) for place in places}
        found = starting_order(waiting, promised, due.__getitem__, by_age=by_age)
        assert found == literally(due, promised)


def test_of_a_long_queue_in_order_few_prompts_are_looked_at():
    looked_at = []

    def due(place):
        looked_at.append(place)
        return 0, float(place)

    order = starting_order(4000, {3999: (0, 2500.5), 7: (0, -inf)}, due, by_age=True)
    assert [order.index(place) for place in (7, 0, 3999)] == [0, 1, 2501]
    assert len(looked_at) < 30
