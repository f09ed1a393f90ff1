"""Against a fake server: after a while the policy ``auto`` is as good as the best choice that could be made."""

from collections import deque
from dataclasses import replace

import numpy as np
import pytest
from step_tables import GAMMA, compute_bound, memory_bound

from sglang_dspark.config import DSparkConfig
from sglang_dspark.scheduling.lagged_survival import LaggedSurvivals
from sglang_dspark.scheduling.sps_table import SpsTable
from sglang_dspark.step.decision import StepDecision
from sglang_dspark.tools.simulator.blocks import ConditionalAcceptance
from sglang_dspark.tools.simulator.costs import Costs, Prefill
from sglang_dspark.tools.simulator.server import Result, SimulatedServer
from sglang_dspark.tools.simulator.workload import Request

pytestmark = pytest.mark.slow

TOLERANCE = 0.025
MACHINES = {"compute bound": compute_bound, "memory bound": memory_bound}
USERS = (1, 4, 16, 64)
CONTEXT = 300
LAG = 2  # steps until a step's outcome is known
TIME_NOISE = 0.03


def wrong_by(table: SpsTable, error: float, share: float, seed: int) -> SpsTable:
    """``table`` as a bad measurement would have it: some cells are off by ``error`` or its inverse."""
    rng = np.random.default_rng(seed)
    shape = table.verify_ms.shape[:2]
    off = np.where(rng.random(shape) < share, rng.choice([1 + error, 1 / (1 + error)], size=shape), 1.0)
    return replace(table, verify_ms=table.verify_ms * off[:, :, None])


class ClosedLoop:
    """The policy ``auto`` and ``requests`` users, whose context stays as long as it is.

    Args:
        truth: how long steps take.
        believed: the table that the server measured.
        acceptance: of every draft, in the mean.
    """

    def __init__(self, truth: SpsTable, believed: SpsTable, acceptance: float, requests: int, seed: int) -> None:
        self.server = SimulatedServer(
            Costs(truth, Prefill(0.0, 0.0), TIME_NOISE, believed), blocks(acceptance), DSparkConfig(), seed=seed
        )
        self.schedule, self.truth = self.server.schedule, truth
        self.parked: list[bool] = []
        self.drafts: list[bool] = []
        self._requests = [Request(index, CONTEXT, 1 << 30) for index in range(requests)]
        self._on_the_way: deque[Result] = deque()
        self._gains: dict[tuple[ConditionalAcceptance, int], np.ndarray] = {}

    def run(self, steps: int) -> float:
        """Tokens per millisecond over the next steps, as many as are expected of what was chosen."""
        tokens = ms = 0.0
        for _ in range(steps):
            result = self.server.decode(self._requests)
            tokens += len(self._requests) + self._gain(result.record.decision)
            self.drafts.append(result.record.decision.draft_len > 0)
            ms += result.ms
            self.parked.append(self.schedule.parked)
            self._on_the_way.append(result)
            if len(self._on_the_way) > LAG:
                known = self._on_the_way.popleft()
                self.schedule.observe(known.record, list(range(len(self._requests))), known.accepted.tolist())
        return tokens / ms

    def best(self) -> float:
        """Tokens per millisecond of the best decision, were it made in every step."""
        count = len(self._requests)
        fixed = (count + self._gains_of(count)[1:]) / self.truth.times(count).at(CONTEXT)[1:]
        return max(float(fixed.max()), count / self.truth.step_ms(count, count, 0, CONTEXT))

    def _gain(self, decision: StepDecision) -> float:
        drafted = len(self._requests) if decision.draft_requests is None else len(decision.draft_requests)
        budget = decision.max_drafts(drafted)
        return float(self._gains_of(drafted)[decision.draft_len, budget])

    def _gains_of(self, drafted: int) -> np.ndarray:
        key = self.server.blocks, drafted
        if key not in self._gains:
            self._gains[key] = expected_gains(*key)
        return self._gains[key]


def blocks(acceptance: float) -> ConditionalAcceptance:
    return ConditionalAcceptance((acceptance,) * GAMMA)


def expected_gains(source: ConditionalAcceptance, requests: int) -> np.ndarray:
    """[depth, budget] drafts accepted per step, where the likeliest ones are verified."""
    many = LaggedSurvivals(GAMMA, tuple(range(1, GAMMA + 1)))
    rng, estimates = np.random.default_rng(0), []
    for _ in range(20):
        logits, _ = source.draw(range(256), rng)
        many.observe((1 / (1 + np.exp(-logits))).cumprod(1))
        estimates.append(many.gains(requests))
    gains = np.mean(estimates, axis=0)
    return np.concatenate([np.zeros_like(gains[:1]), gains])


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
