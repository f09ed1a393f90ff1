"""The choice of a step under the policy ``auto``: how deep to draft, and how many drafts to verify.

All inputs were known before the step's noise is drawn: measured times and the survivals of earlier steps. That keeps
the output exact, see docs/scheduling.md.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from sglang_dspark.scheduling.lagged_survival import LaggedSurvivals
from sglang_dspark.scheduling.policies import Beside
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
        """Return the expected throughput, which the policy maximises."""
        return self.committed / self.ms


@dataclass(frozen=True)
class Evaluation:
    """The candidates for a number of requests.

    Attributes:
        plain: the step that drafts nothing and commits one token per request.
        by_drafts: the fastest step for each number of drafts per request that can be verified, from 0, the plain step,
            to gamma.
        best: the fastest speculative step.
    """

    plain: Candidate
    by_drafts: list[Candidate]
    best: Candidate


def evaluate_steps(
    times: StepTimes, survivals: LaggedSurvivals, requests: int, context: float, *, uniform: bool = False
) -> Evaluation:
    """Evaluate every step that ``requests`` requests can take: (R + gain) / T over all depths and token counts.

    Args:
        context: mean context tokens per request.
        uniform: whether all requests verify as many drafts, each of them its whole block.
    """
    load = times.load(requests)
    all_ms = times.step_ms(requests, context)
    plain = Candidate(0, int(load.num_tokens[0]), float(all_ms[0, 0]), requests)
    ms = all_ms.take(survivals.depths, axis=0)  # [depths, n], as the next two
    budgets = np.minimum(load.num_tokens - requests, requests * times.table.gamma)
    committed = requests + survivals.gains(requests)[:, budgets]
    # A step that verifies none of its drafts has nothing over the plain one.
    rates: NDArray[np.float64] = np.where(load.num_tokens > requests, committed / ms, 0.0)
    depths: Sequence[int] = range(1, times.table.gamma + 1)
    if uniform:
        depths = survivals.depths
        whole = requests * (1 + np.array(depths))[:, None]
        rates = np.where(load.num_tokens == whole, rates, 0.0)

    def candidate(row: int, column: int) -> Candidate:
        return Candidate(
            survivals.depths[row], int(load.num_tokens[column]), float(ms[row, column]), float(committed[row, column])
        )

    columns = [load.column(drafts) for drafts in depths]
    return Evaluation(
        plain=plain,
        by_drafts=[plain, *(candidate(int(rates[:, column].argmax()), column) for column in columns)],
        best=candidate(*divmod(int(rates.argmax()), rates.shape[1])),
    )


def worth_most_beside(
    times: StepTimes, survivals: LaggedSurvivals, requests: int, context: float, beside: Beside, worth: float
) -> Candidate:
    """Return the step that commits the most tokens beyond what its time is worth, beside rows that take some of it.

    A ratio of tokens to time would charge the drafts for those rows, and buy too many. Where no step keeps the bound,
    the shortest one is taken.

    Args:
        beside: rows of its verification that are none of the requests'.
        worth: tokens per millisecond of the best step without such rows.
    """
    joined = times.load(requests + beside.requests)
    first = int(joined.room_for(requests + beside.rows))
    joined_context = beside.joined_context(requests, context)
    verify_ms = times.step_ms(requests + beside.requests, joined_context)[0, first:]
    alone_ms = times.step_ms(requests, context)[:, 0]
    drafts = np.minimum(joined.num_tokens[first:] - beside.rows - requests, requests * times.table.gamma)
    # [1 + depths, n], the plain step first.
    ms = verify_ms + np.append(0.0, alone_ms[list(survivals.depths)] - alone_ms[0])[:, None]
    gains = survivals.gains(requests)[:, drafts]
    committed = requests + np.concatenate([np.zeros((1, len(drafts))), gains])
    value = committed - worth * ms
    late_ms = np.maximum(ms * times.common_factor, beside.bound_ms)
    row, column = divmod(int(np.where(late_ms == late_ms.min(), value, -np.inf).argmax()), len(drafts))
    depth = 0 if row == 0 else survivals.depths[row - 1]
    return Candidate(depth, requests + int(drafts[column]), float(ms[row, column]), float(committed[row, column]))
