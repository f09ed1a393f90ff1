"""Against a fake server: after a while the policy ``auto`` is as good as the best choice that could be made."""

import numpy as np
import pytest
from closed_loop import ClosedLoop, blocks, wrong_by
from step_tables import compute_bound, memory_bound

pytestmark = pytest.mark.slow

TOLERANCE = 0.025
MACHINES = {"compute bound": compute_bound, "memory bound": memory_bound}
USERS = (1, 4, 16, 64)


def switches(loop, since):
    """Return how often the server parked or resumed."""
    return int(np.diff(np.array(loop.parked[since:], dtype=int)).astype(bool).sum())


def simulate(machine, acceptance, users, seed, believed=lambda table: table):
    truth = MACHINES[machine]()
    return ClosedLoop(truth, believed(truth), acceptance, users, seed)


@pytest.mark.parametrize("acceptance", [0.35, 0.8])
@pytest.mark.parametrize("machine", MACHINES)
def test_it_finds_the_best_choice_at_every_concurrency(machine, acceptance):
    missed, switched = {}, {}
    for users in USERS:
        loop = simulate(machine, acceptance, users, seed=users)
        loop.run(400)
        missed[users] = 1 - loop.run(300) / loop.best()
        switched[users] = switches(loop, since=400)
    assert max(missed.values()) < TOLERANCE, missed
    assert max(switched.values()) <= 2, switched


@pytest.mark.parametrize("machine", MACHINES)
def test_it_finds_the_best_choice_with_a_table_that_is_wrong(machine):
    """A quarter of the cells by 20 %, either way: more than most choices differ by."""
    missed = {}
    for users in USERS:
        loop = simulate(machine, 0.75, users, users, lambda table, users=users: wrong_by(table, 0.2, 0.25, users))
        loop.run(700)
        missed[users] = 1 - loop.run(300) / loop.best()
    assert max(missed.values()) < TOLERANCE, missed


def test_a_wrong_table_would_cost_more_if_it_were_believed(monkeypatch):
    """Without observations the same servers lose what the loop mends."""
    missed = {}
    for users in USERS:
        loop = simulate("compute bound", 0.75, users, users, lambda t, users=users: wrong_by(t, 0.2, 0.25, users))
        monkeypatch.setattr(loop.schedule.times, "observe", lambda kind, ms: None)
        loop.run(200)
        missed[users] = 1 - loop.run(200) / loop.best()
    assert max(missed.values()) > 2 * TOLERANCE, missed


@pytest.mark.parametrize("users", [1, pytest.param(64, marks=pytest.mark.thorough)])
def test_it_follows_a_change_of_the_text(users):
    """Drafts get bad, and good again. A lone request is left undrafted before the server parks."""
    loop = simulate("compute bound", 0.95, users, seed=1)
    loop.run(400)
    assert all(loop.drafts[-100:])
    loop.server.blocks = blocks(0.05)
    loop.run(400)
    assert sum(loop.drafts[-100:]) < 20
    loop.server.blocks = blocks(0.95)
    loop.run(4000)
    assert sum(loop.drafts[-100:]) > 80
