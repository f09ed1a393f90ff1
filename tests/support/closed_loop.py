"""The simulated server with users that always want more, beside the best step that could be taken."""

from collections import deque
from dataclasses import replace

import numpy as np
from step_tables import GAMMA

from sglang_dspark.config import DSparkConfig
from sglang_dspark.scheduling.lagged_survival import LaggedSurvivals
from sglang_dspark.scheduling.sps_table import SpsTable
from sglang_dspark.step.decision import StepDecision
from sglang_dspark.tools.simulator.blocks import ConditionalAcceptance
from sglang_dspark.tools.simulator.costs import Costs, Prefill
from sglang_dspark.tools.simulator.server import Result, SimulatedServer
from sglang_dspark.tools.simulator.workload import Request

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
            step_ms, result = self.server.decode(self._requests)
            tokens += len(self._requests) + self._gain(result.record.decision)
            self.drafts.append(result.record.decision.draft_len > 0)
            ms += step_ms
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
