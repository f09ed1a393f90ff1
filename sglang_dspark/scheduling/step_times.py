"""The SPS table kept honest by the times of the steps that were really taken.

A step takes a device, and it takes the host, which schedules and reads results. Where the two take turns, as on a CPU,
a step takes the sum of both. Under overlap it takes the larger one: while the host is the slower of the two, the device
can verify what it likes at no cost.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from sglang_dspark.scheduling.sps_table import LoadTimes, SpsTable

# Standard deviations, of logarithms of measured over predicted time. The machine may be faster or slower than when the
# table was measured, and a busy neighbour changes that within a few steps; what the table is wrong about stays.
_SPEED, _SPEED_DRIFT = 1.0, 0.02  # at first, and per step that teaches (:mod:`sglang_dspark.scheduling.step_clock`)
_ERROR, _ERROR_DRIFT = 0.15, 0.0015
_NOISE = 0.1
UNKNOWN_STDDEV = math.sqrt(2) * _ERROR
"""Of the ratio of two kinds of step that were never compared: :meth:`StepTimes.stddev` at first."""
_SHORTEST_MS = 1e-3  # what a clock that has not moved stands for
# More than this is a hiccup of the machine, and counts as this much.
_MAX_SURPRISE = 0.25
# Weight of a step's host time in its running mean, and the most that one step may say it is, in milliseconds over that.
_HOST_WEIGHT, _MAX_HOST_RISE_MS = 0.05, 5.0
# A correction stays within this factor; an error beyond it calls for a new table.
_MAX_LOG_ERROR = math.log(1.5)


@dataclass(frozen=True)
class StepKind:
    """What determines the time of a step. ``depth`` drafts proposed per request, ``num_tokens`` tokens verified."""

    requests: int
    num_tokens: int
    depth: int
    context: float


class StepTimes:
    """Predicted step times: the table, times what the running server has taught, and the host's part.

    Args:
        table: of the device's part.
        overlapped: whether host and device work side by side.

    Attributes:
        measured_ms, predicted_ms: running means over the steps observed, for reports.
    """

    def __init__(self, table: SpsTable, *, overlapped: bool = False) -> None:
        self.table = table
        self._overlapped = overlapped
        self._filters: dict[int, StepTimeFilter] = {}
        self._host_ms: dict[int, float] = {}
        self._num_steps = 0
        self._speed = 0.0
        self.measured_ms = self.predicted_ms = self._weight = 0.0

    def load(self, requests: int) -> LoadTimes:
        """Token counts that ``requests`` requests can verify."""
        return self.table.times(requests)

    def step_ms(self, requests: int, context: float) -> NDArray[np.float64]:
        """[gamma + 1, n] milliseconds by depth and by the token counts of :meth:`load`.

        Times of the machine that measured the table: its speed does not change which step is best.
        """
        times = self.table.times(requests)
        ms: NDArray[np.float64] = self._corrected(times.at(context), requests, times.drafts)
        return ms

    def one(self, requests: int, drafts: int, depth: int, context: float) -> float:
        """Milliseconds of one step that drafts to ``depth`` and verifies ``drafts`` drafts in all, out of those."""
        times = self.table.times(requests)
        column = times.column(drafts / requests)
        return float(self._corrected(float(times.at(context, (depth, column))), requests, float(times.drafts[column])))

    def _corrected(self, table_ms: Any, requests: int, drafts: Any) -> Any:
        """What the table says of steps with so many drafts per request, numbers or arrays, as it turned out to be."""
        belief = self._filters.get(_bucket(requests))
        factor = 1.0 if belief is None else np.exp(belief.error(drafts))
        return self._total(table_ms * factor, self._of_host_ms(requests))

    def _total(self, device_ms: Any, host_ms: float) -> Any:
        """Milliseconds of a step, a number or an array."""
        if not self._overlapped:
            return device_ms + host_ms
        return max(device_ms, host_ms) if isinstance(device_ms, float) else np.maximum(device_ms, host_ms)

    def _of_host_ms(self, requests: int) -> float:
        """Host time of a step, as of the nearest load that was seen, on the machine that measured the table."""
        if not self._host_ms:
            return 0.0
        bucket = _bucket(requests)
        if bucket not in self._host_ms:
            bucket = min(self._host_ms, key=lambda known: abs(known - bucket))
        return self._host_ms[bucket] * math.exp(-self._speed)

    def by_drafts(self, requests: int, depth: int, context: float) -> NDArray[np.float64]:
        """[requests * depth + 1] milliseconds of a step that drafts to ``depth`` and verifies that many drafts."""
        times = self.table.times(requests)
        tokens = np.arange(requests, requests * (depth + 1) + 1)
        ms: NDArray[np.float64] = self.step_ms(requests, context)[depth, times.room_for(tokens)]
        return ms

    def stddev(self, requests: int, drafts: int) -> NDArray[np.float64]:
        """[gamma + 1] standard deviation, in logarithms, of the time of a step against one of ``drafts`` per request.

        By drafts per request; it shrinks with every look, and grows again when there was none for long.
        """
        belief = self._filters.get(_bucket(requests)) or StepTimeFilter(self.table.gamma)
        return belief.stddev(drafts)

    def observe(self, kind: StepKind, device_ms: float, host_ms: float = 0.0) -> float:
        """Learn from one step.

        Args:
            device_ms: what it took the device, which is what the table knows.
            host_ms: what it took the host, while nothing was computed or beside that. Other steps of as many requests
                will take as long for it.

        Returns:
            Milliseconds that were expected of it, the machine's speed included.
        """
        self._num_steps += 1
        bucket = _bucket(kind.requests)
        if bucket not in self._filters:
            self._filters[bucket] = StepTimeFilter(self.table.gamma)
        belief = self._filters[bucket]
        times = self.load(kind.requests)
        column = times.room_for(kind.num_tokens)
        drafts, table_ms = float(times.drafts[column]), float(times.at(kind.context, (kind.depth, column)))
        expected = belief.observe(drafts, math.log(max(device_ms, _SHORTEST_MS) / table_ms), self._num_steps)
        self._speed = belief.speed
        mean_host_ms = self._host_ms.setdefault(bucket, host_ms)
        self._host_ms[bucket] += _HOST_WEIGHT * min(host_ms - mean_host_ms, _MAX_HOST_RISE_MS)
        predicted_ms = float(self._total(table_ms * math.exp(belief.error(drafts)), mean_host_ms))
        self._weight = 0.98 * self._weight + 1
        self.measured_ms += (float(self._total(device_ms, host_ms)) - self.measured_ms) / self._weight
        self.predicted_ms += (predicted_ms - self.predicted_ms) / self._weight
        return float(self._total(table_ms * math.exp(expected), mean_host_ms))

    def report(self) -> dict[str, Any]:
        """JSON form.

        By requests (powers of two): ``host_ms`` of a step; ``correction``, factors on the table by drafts.
        """
        seen = self._num_steps > 0
        grid = np.arange(self.table.gamma + 1.0)
        return {
            "measured_ms": self.measured_ms if seen else None,
            "predicted_ms": self.predicted_ms if seen else None,
            "common_factor": math.exp(self._speed),
            "host_ms": {str(1 << bucket): round(ms, 3) for bucket, ms in sorted(self._host_ms.items())},
            "correction": {
                str(1 << bucket): np.exp(belief.error(grid)).round(4).tolist()
                for bucket, belief in sorted(self._filters.items())
            },
        }


class StepTimeFilter:
    """What is known about steps of about so many requests: a Kalman filter.

    Its state is the machine's speed, and the table's error for every number of drafts per request. A step shows their
    sum only. As long as nothing but one kind of step is taken, the speed accounts for it; another kind now and then
    tells the two apart.
    """

    def __init__(self, gamma: int) -> None:
        self._grid = np.arange(gamma + 1.0)
        self._mean = np.zeros(gamma + 2)
        self._covariance = np.diag([_SPEED**2, *[_ERROR**2] * (gamma + 1)])
        self._variances = np.einsum("ii->i", self._covariance)  # a view
        self._drift = np.array([_SPEED_DRIFT**2, *[_ERROR_DRIFT**2] * (gamma + 1)])
        self._last_step = 0

    @property
    def speed(self) -> float:
        return float(self._mean[0])

    def error(self, drafts: Any) -> Any:
        """Logarithm of the correction by drafts per request, a number or an array; between whole numbers linear."""
        if not isinstance(drafts, float):
            return np.interp(drafts, self._grid, self._mean[1:])
        # The same for one number, in a tenth of the time.
        low, share = self._place(drafts)
        below, above = self._mean[1 + low : 3 + low].tolist()
        return below + share * (above - below)

    def _place(self, drafts: float) -> tuple[int, float]:
        """Return where ``drafts`` lies on the grid: the point below it, and the share of the way to the next."""
        low = min(int(drafts), len(self._grid) - 2)
        return low, drafts - low

    def stddev(self, drafts: int) -> NDArray[np.float64]:
        variances, shared = self._variances[1:], self._covariance[1 + drafts, 1:]
        doubt: NDArray[np.float64] = np.sqrt(np.maximum(variances + variances[drafts] - 2 * shared, 0.0))
        return doubt

    def observe(self, drafts: float, log_ratio: float, step: int) -> float:
        """Account for a step that took ``exp(log_ratio)`` times what the table says.

        Returns:
            The logarithm that was expected.
        """
        self._variances += self._drift
        # Of the machine's speed less is known when steps with other loads came in between.
        elsewhere = step - self._last_step - 1
        self._variances[0] = min(self._variances[0] + elsewhere * self._drift[0], _SPEED**2)
        self._last_step = step
        low, share = self._place(drafts)
        seen = np.zeros(len(self._mean))
        seen[0], seen[1 + low], seen[2 + low] = 1.0, 1.0 - share, share
        shared = self._covariance @ seen
        expected = float(seen @ self._mean)
        surprise = min(max(log_ratio - expected, -_MAX_SURPRISE), _MAX_SURPRISE)
        gain = shared / (float(seen @ shared) + _NOISE**2)
        self._mean += gain * surprise
        errors = self._mean[1:]
        np.maximum(np.minimum(errors, _MAX_LOG_ERROR, out=errors), -_MAX_LOG_ERROR, out=errors)
        self._covariance -= gain[:, None] * shared
        return expected


def _bucket(requests: int) -> int:
    """Index of the power of two nearest to ``requests``."""
    return round(math.log2(requests))
