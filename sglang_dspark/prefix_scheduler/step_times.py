"""The SPS table kept honest by the times of the steps that were really taken."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np

from sglang_dspark.prefix_scheduler.sps_table import Array, LoadTimes, SpsTable

# Rates of the running means of log(measured / predicted). A busy neighbour slows all steps alike: the common factor
# follows within a few steps. What is left is an error of the table at one kind of step (a cell): a plain mean over its
# first steps, a running one later, and neither before the common factor has settled.
_COMMON_RATE = 0.2
_CELL_RATE = 0.03
_SETTLING_STEPS = 20
# A step's error is clipped to these: a hiccup of the machine must not count for more than a few ordinary steps.
_MAX_LOG_RATIO = math.log(2.0)
_MAX_CELL_ERROR = math.log(1.2)
# A cell's correction stays within these factors; an error beyond them calls for a new table.
_MAX_LOG_CELL = math.log(1.5)


@dataclass(frozen=True)
class StepKind:
    """What determines the time of a step. ``depth`` drafts proposed per request, ``num_tokens`` tokens verified."""

    requests: int
    num_tokens: int
    depth: int
    context: float


class StepTimes:
    """Predicted step times: the table, times what the running server has taught.

    Attributes:
        measured_ms, predicted_ms: running means over the steps observed, for reports.
    """

    def __init__(self, table: SpsTable) -> None:
        self.table = table
        self._common = 0.0
        # By requests (powers of two) and drafts per request.
        self._cells = np.zeros((32, table.gamma + 1))
        self._weights = np.zeros_like(self._cells)  # steps that a cell has seen
        self._seen_at = np.zeros_like(self._cells)  # the last of them, counted over all cells
        self._num_steps = 0
        self._cell_grid = np.arange(table.gamma + 1.0)
        self.measured_ms = self.predicted_ms = self._weight = 0.0

    def load(self, requests: int) -> LoadTimes:
        """Token counts that ``requests`` requests can verify."""
        return self.table.times(requests)

    def step_ms(self, requests: int, context: float) -> Array:
        """[gamma + 1, n] milliseconds by depth and by the token counts of :meth:`load`.

        The common factor is left out: it does not change which step is best.
        """
        times = self.table.times(requests)
        cells = self._cells[_bucket(requests)]
        ms: Array = times.at(context)
        if cells.any():
            ms = ms * np.interp(times.drafts, self._cell_grid, np.exp(cells))
        return ms

    def by_drafts(self, requests: int, depth: int, context: float) -> Array:
        """[requests * depth + 1] milliseconds of a step that drafts to ``depth`` and verifies that many drafts."""
        times = self.table.times(requests)
        tokens = np.arange(requests, requests * (depth + 1) + 1)
        columns = np.searchsorted(times.num_tokens, tokens).clip(max=len(times.num_tokens) - 1)
        ms: Array = self.step_ms(requests, context)[depth, columns]
        return ms

    def one(self, requests: int, drafts: int, depth: int, context: float) -> float:
        """Milliseconds of one step that drafts to ``depth`` and verifies ``drafts`` drafts in all."""
        column = self.load(requests).column(drafts / requests)
        return float(self.step_ms(requests, context)[depth, column])

    def last_seen(self, requests: int) -> Array:
        """[gamma + 1] when a step with about so many requests and drafts per request was observed: later is larger."""
        return self._seen_at[_bucket(requests)]

    def observe(self, kind: StepKind, measured_ms: float) -> None:
        """Learn from one step."""
        self._num_steps += 1
        predicted = self.table.step_ms(kind.requests, kind.num_tokens, kind.depth, kind.context)
        drafts = min(kind.num_tokens / kind.requests - 1, self.table.gamma)
        bucket = _bucket(kind.requests)
        self._seen_at[bucket, round(drafts)] = self._num_steps
        # The correction is interpolated between the cells on either side, and both learn.
        low = min(int(drafts), self.table.gamma - 1)
        sides = ((low, 1.0 - drafts + low), (low + 1, drafts - low))
        cells, weights = self._cells[bucket], self._weights[bucket]
        predicted *= sum(share * math.exp(cells[side]) for side, share in sides)
        error = _clip(math.log(measured_ms / predicted) - self._common, _MAX_LOG_RATIO)
        self._common += _COMMON_RATE * error
        if self._num_steps > _SETTLING_STEPS:
            error = _clip(error, _MAX_CELL_ERROR)
            for side, share in sides:
                weights[side] += share
                rate = share * max(_CELL_RATE, 1 / (1 + weights[side]))
                cells[side] = _clip(float(cells[side]) + rate * error, _MAX_LOG_CELL)
        self._weight = 0.98 * self._weight + 1
        self.measured_ms += (measured_ms - self.measured_ms) / self._weight
        self.predicted_ms += (predicted - self.predicted_ms) / self._weight

    def report(self) -> dict[str, Any]:
        """JSON form. ``correction``: factor on the table by requests (powers of two) and drafts per request."""
        rows = {
            str(1 << bucket): [round(math.exp(value), 4) for value in cells]
            for bucket, cells in enumerate(self._cells)
            if cells.any()
        }
        seen = self._weight > 0
        return {
            "measured_ms": self.measured_ms if seen else None,
            "predicted_ms": self.predicted_ms if seen else None,
            "common_factor": math.exp(self._common),
            "correction": rows,
        }


def _clip(value: float, bound: float) -> float:
    return min(max(value, -bound), bound)


def _bucket(requests: int) -> int:
    """Index of the power of two nearest to ``requests``."""
    return round(math.log2(requests))
