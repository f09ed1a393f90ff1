"""The choice of a step under the policy ``auto``: how deep to draft, and how many drafts to verify.

All inputs were known before the step's noise is drawn: measured times and the survivals of earlier steps. That keeps
the output exact, see docs/scheduling.md.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from sglang_dspark.prefix_scheduler.lagged_survival import LaggedSurvivals
from sglang_dspark.prefix_scheduler.sps_table import Array
from sglang_dspark.prefix_scheduler.step_times import StepTimes


@dataclass(frozen=True)
class Candidate:
    """A step that could be taken.

    Attributes:
        depth: drafts proposed per request; 0 for the plain step.
        num_tokens: tokens in the verify forward, anchors included.
        tokens_per_ms: expected committed tokens per millisecond.
    """

    depth: int
    num_tokens: int
    tokens_per_ms: float


@dataclass(frozen=True)
class Outlook:
    """The candidates that matter for a given load.

    Attributes:
        plain: one token per request, nothing drafted.
        best: the fastest speculative step.
        incumbent: the step like the last one: as deep, and as many drafts per request.
    """

    plain: Candidate
    best: Candidate
    incumbent: Candidate


def outlook(
    times: StepTimes,
    survivals: LaggedSurvivals,
    requests: int,
    context: float,
    last_depth: int,
    last_drafts: float,
) -> Outlook:
    """Evaluate every step that ``requests`` requests can take: (R + gain) / T over all depths and token counts.

    Args:
        context: mean context tokens per request.
        last_depth, last_drafts: depth of the last speculative step, and its verified drafts per request.
    """
    load = times.load(requests)
    ms = times.step_ms(requests, context)
    budgets = np.minimum(load.num_tokens - requests, survivals.gains(requests).shape[1] - 1)
    gains = survivals.gains(requests)[:, budgets]  # [depths, n]
    rates: Array = (requests + gains) / ms[list(survivals.depths)]
    row, column = divmod(int(rates.argmax()), rates.shape[1])
    last_row = survivals.depths.index(last_depth) if last_depth in survivals.depths else len(survivals.depths) - 1
    last_column = int(np.abs(load.drafts - last_drafts).argmin())

    def candidate(row: int, column: int) -> Candidate:
        return Candidate(survivals.depths[row], int(load.num_tokens[column]), float(rates[row, column]))

    return Outlook(
        plain=Candidate(0, int(load.num_tokens[0]), requests / float(ms[0, 0])),
        best=candidate(row, column),
        incumbent=candidate(last_row, last_column),
    )
