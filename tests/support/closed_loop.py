"""A server made of formulas: true step times, true survivals, and the policy ``auto`` that has to find out."""

from collections import deque
from dataclasses import dataclass, field, replace

import numpy as np
from step_tables import GAMMA

from sglang_dspark.scheduling.auto_policy import AutoPolicy, draft_depths
from sglang_dspark.scheduling.lagged_survival import LaggedSurvivals
from sglang_dspark.scheduling.sps_table import SpsTable
from sglang_dspark.scheduling.step_times import StepKind, StepTimes
from sglang_dspark.step.choice import Choice
from sglang_dspark.tools.simulator.costs import Costs, Prefill

CONTEXT = 300.0
LAG = 2  # steps until a step's survivals are known
TIME_NOISE = 0.03


def wrong_by(table: SpsTable, error: float, share: float, seed: int) -> SpsTable:
    """``table`` as a bad measurement would have it: some cells are off by ``error`` or its inverse."""
    rng = np.random.default_rng(seed)
    shape = table.verify_ms.shape[:2]
    off = np.where(rng.random(shape) < share, rng.choice([1 + error, 1 / (1 + error)], size=shape), 1.0)
    return replace(table, verify_ms=table.verify_ms * off[:, :, None])


@dataclass
class Drafter:
    """Survivals are known exactly; conditional acceptance varies from draft to draft around ``mean``."""

    mean: float
    rng: np.random.Generator

    def survivals(self, rounds: int) -> np.ndarray:
        return self.rng.beta(4 * self.mean, 4 * (1 - self.mean), size=(rounds, GAMMA)).cumprod(1)


@dataclass
class ClosedLoop:
    """``requests`` users who always want more.

    Attributes:
        truth: how long steps take.
        believed: the table that the server measured.
    """

    truth: SpsTable
    believed: SpsTable
    drafter: Drafter
    requests: int
    choices: list[Choice] = field(default_factory=list)
    parked: list[bool] = field(default_factory=list)

    def __post_init__(self) -> None:
        survivals = LaggedSurvivals(GAMMA, draft_depths(self.believed.draft_ms))
        self.policy = AutoPolicy(StepTimes(self.believed), survivals)
        self._on_the_way: deque[np.ndarray] = deque()
        many = LaggedSurvivals(GAMMA, tuple(range(1, GAMMA + 1)))
        estimates = []
        for _ in range(20):
            many.observe(self.drafter.survivals(256))
            estimates.append(many.gains(self.requests))
        gains = np.mean(estimates, axis=0)
        self._gains = np.concatenate([np.zeros_like(gains[:1]), gains])  # [depth, budget]
        self._costs = Costs(self.truth, Prefill(0.0, 0.0))

    def run(self, steps: int) -> float:
        """Tokens per millisecond over the next steps."""
        tokens = ms = 0.0
        for _ in range(steps):
            choice = self.policy.choose(self.requests, CONTEXT)
            step_tokens, step_ms = self._take(choice)
            tokens, ms = tokens + step_tokens, ms + step_ms
            self.choices.append(choice)
            self.parked.append(self.policy.parked)
        return tokens / ms

    def best(self) -> float:
        """Tokens per millisecond of the best choice, were it made in every step."""
        fixed = (self.requests + self._gains[1:]) / self.truth.times(self.requests).at(CONTEXT)[1:]
        return max(float(fixed.max()), self.plain())

    def plain(self) -> float:
        return self.requests / self.truth.step_ms(self.requests, self.requests, 0, CONTEXT)

    def _take(self, choice: Choice) -> tuple[float, float]:
        step_ms = self._costs.step_ms(
            choice, self.requests, self.requests + choice.budget, CONTEXT, longest=choice.depth
        )
        gain = self._gains[choice.depth, choice.budget]
        survival = np.full((self.requests, GAMMA), np.nan)
        survival[:, : choice.depth] = self.drafter.survivals(self.requests)[:, : choice.depth]
        if choice.drafted is not None:
            survival = np.repeat(survival[: choice.depth > 0], choice.weight, axis=0)
            gain /= self.requests
        else:
            noise = np.exp(TIME_NOISE * self.drafter.rng.standard_normal())
            kind = StepKind(self.requests, self.requests + choice.budget, choice.depth, CONTEXT)
            self.policy.times.observe(kind, step_ms * noise)
        self._on_the_way.append(survival[:0] if choice.depth == 0 else survival)
        if len(self._on_the_way) > LAG:
            known = self._on_the_way.popleft()
            if len(known):
                self.policy.survivals.observe(known)
        return self.requests + gain, step_ms
