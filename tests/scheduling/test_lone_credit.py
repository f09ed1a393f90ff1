"""A credit bounds what speculation may lose on a request that runs alone."""

import numpy as np
import pytest

from sglang_dspark.scheduling.auto_policy import MOST, RATE, STAKE, LoneCredit


def useless_steps(credit, cost, *, steps, request="r", pays=True):
    """Return at which of the next steps drafts are made; none is accepted."""
    return [step for step in range(steps) if credit.affords(request, cost, pays=pays)]


@pytest.mark.parametrize("seed", range(4))
def test_no_request_loses_more_than_its_stake_and_the_rate(seed):
    """Whatever its steps cost and bring, and however late that is known."""
    rng, credit = np.random.default_rng(seed), LoneCredit()
    gained, behind = 0.0, [0, 0]
    for step in range(1, 2000):
        cost, luck = rng.uniform(0, STAKE), rng.choice([0.0, 0.1, 0.5])
        if drafts := credit.affords("r", cost, pays=True):
            gained -= cost
        behind.append(int(drafts and rng.random() < luck))
        gained += behind[-1]
        credit.earn("r", behind.pop(0))
        assert gained >= -STAKE - RATE * step
    assert gained < 100, "such drafts do not pay"


def test_a_hard_text_is_given_up_after_the_stake_and_tried_again_at_the_rate():
    drafted = useless_steps(LoneCredit(), 0.5, steps=100)
    assert drafted[:4] == [0, 1, 2, 3]
    assert set(np.diff(drafted[4:])) == {0.5 / RATE}


def test_what_was_gained_is_kept_up_to_a_limit():
    credit = LoneCredit()
    for _ in range(50):
        assert credit.affords("r", 0.5, pays=True)
        credit.earn("r", 3)
    assert len(useless_steps(credit, 0.5, steps=15)) == MOST / 0.5
    credit.earn("another", 3)
    assert useless_steps(credit, 0.5, steps=8) == []


@pytest.mark.parametrize(("pays", "trials"), [(True, 4), (False, 0)])
def test_the_next_request_has_a_stake_if_drafts_are_expected_to_pay(pays, trials):
    credit = LoneCredit()
    useless_steps(credit, 0.5, steps=10)
    assert len(useless_steps(credit, 0.5, steps=8, request="next", pays=pays)) == trials


def test_no_request_inherits_more_than_a_stake():
    credit = LoneCredit()
    credit.affords("r", 0.0, pays=True)
    credit.earn("r", 9)
    assert len(useless_steps(credit, 0.5, steps=20, request="next", pays=False)) == STAKE / 0.5


def test_a_step_is_tried_whatever_the_table_says_it_costs():
    assert useless_steps(LoneCredit(), 10 * STAKE, steps=50) == [0]
