"""The choice of a step under the policy ``auto``: how deep to draft, and how many drafts to verify.

All inputs were known before the step's noise is drawn: measured times and the survivals of earlier steps. That keeps
the output exact, see docs/scheduling.md.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from sglang_dspark.scheduling.lagged_survival import LaggedSurvivals
from sglang_dspark.scheduling.step_times import StepTimes


@dataclass(frozen=True)
class Candidate:
    """A step that could be taken.

    Attributes:
        depth: drafts proposed per request; 0 for the plain step.
        num_tokens: tokens in the verify forward, anchors included.
        ms: its time.
        committed: tokens that it is expected to commit.
    """

    depth: int
    num_tokens: int
    ms: float
    committed: float

    @property
    def tokens_per_ms(self) -> float:
        """Return what is to be maximised."""
        return self.committed / self.ms


@dataclass(frozen=True)
class Evaluation:
    """The candidates that matter for a given load.

    Attributes:
        plain: one token per request, nothing drafted.
        best: the fastest speculative step.
        current: the step like the last one: as deep, and as many drafts per request.
    """

    plain: Candidate
    best: Candidate
    current: Candidate


def evaluate_steps(
    times: StepTimes,
    survivals: LaggedSurvivals,
    requests: int,
    context: float,
    last_depth: int,
    last_drafts: float,
) -> Evaluation:
    """Evaluate every step that ``requests`` requests can take: (R + gain) / T over all depths and token counts.

    Args:
        context: mean context tokens per request.
        last_depth, last_drafts: depth of the last speculative step, and its verified drafts per request.
    """
    steps = _Steps(times, survivals, requests, context)
    depths = survivals.depths
    last_row = depths.index(last_depth) if last_depth in depths else len(depths) - 1
    return Evaluation(
        plain=steps.plain,
        best=steps.candidate(*divmod(int(steps.rates.argmax()), steps.rates.shape[1])),
        current=steps.candidate(last_row, steps.load.column(last_drafts)),
    )


def by_drafts(times: StepTimes, survivals: LaggedSurvivals, requests: int, context: float) -> list[Candidate]:
    """The fastest step for each number of drafts per request, from 0, the plain step, to gamma."""
    steps = _Steps(times, survivals, requests, context)
    columns = [steps.load.column(drafts) for drafts in range(1, times.table.gamma + 1)]
    return [steps.plain, *(steps.candidate(int(steps.rates[:, column].argmax()), column) for column in columns)]


class _Steps:
    """Every speculative step: [depths, n] arrays by block depth and token count."""

    def __init__(self, times: StepTimes, survivals: LaggedSurvivals, requests: int, context: float) -> None:
        self.load = times.load(requests)
        ms = times.step_ms(requests, context)
        self.plain = Candidate(0, int(self.load.num_tokens[0]), float(ms[0, 0]), requests)
        self.depths = survivals.depths
        self.committed = requests + survivals.gains(requests)[:, self.load.budgets]
        self.ms = ms.take(self.depths, axis=0)
        self.rates: NDArray[np.float64] = self.committed / self.ms

    def candidate(self, row: int, column: int) -> Candidate:
        committed, ms = float(self.committed[row, column]), float(self.ms[row, column])
        return Candidate(self.depths[row], int(self.load.num_tokens[column]), ms, committed)
