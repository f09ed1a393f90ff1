"""Times of real steps, from the choice of one to the choice of the next, and the SPS table that they correct.

A step needs the device, and the host, which schedules and reads results. If the two take turns, as on a CPU, a step
takes the sum of both times. Under overlap it takes the larger one: while the host is slower, more verification costs
nothing.
"""

from __future__ import annotations

import math
import time
from collections import deque
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from sglang_dspark.scheduling.sps_table import LoadTimes, SpsTable
from sglang_dspark.step.decision import TimedStep

# Standard deviations of logarithms of measured over predicted time, at first and per update. The machine may be faster
# or slower than when the table was measured (1.5 means that nothing is known), and a busy neighbour changes that within
# a few steps. A table that was measured next to another program is wrong about a kind of step by some thirty percent,
# and stays so: 0.0015 grow to 5 % in 1000 steps, after which the kind is worth another exploration.
_SPEED, _SPEED_DRIFT = 1.5, 0.02
_ERROR, _ERROR_DRIFT = 0.3, 0.0015
_NOISE = 0.1  # of one step on a shared machine; a quiet one has 0.03
# Standard deviations at which a measured step time is clipped: beyond them it is an outlier.
_MAX_DEVIATION = 2.5
_MAX_ERROR = math.log(4)  # keeps a filter that has gone wrong within what a measurement can be
# Weight of a step's host time in its running mean, which follows within twenty steps, and the most that one step may
# say it is, in milliseconds over that mean: a pause between two steps is no host time.
_HOST_WEIGHT, _MAX_HOST_RISE_MS = 0.05, 5.0


@dataclass(frozen=True)
class StepKind:
    """The load of a step: ``depth`` drafts are proposed per request and ``num_tokens`` tokens verified."""

    requests: int
    num_tokens: int
    depth: int
    context: float


class StepTimes:
    """Predicted step times: the table, corrected by measured steps, and the host's part.

    Args:
        table: of the device's part.
        overlapped: whether host and device work side by side.
        padded: whether attention pads all requests to the one that verifies most, as on a CPU.

    Attributes:
        measured_ms, predicted_ms: running means over the steps observed, for reports.
    """

    def __init__(self, table: SpsTable, *, overlapped: bool = False, padded: bool = True) -> None:
        self.table = table.monotone()
        self._overlapped, self._padded = overlapped, padded
        self._filters: dict[int, StepTimeFilter] = {}
        self._host_ms: dict[int, float] = {}
        self._num_steps = 0
        self._speed = 0.0
        self.measured_ms = self.predicted_ms = self._weight = 0.0

    def step_ms(self, requests: int, context: float) -> NDArray[np.float64]:
        """Return [gamma + 1, n] milliseconds by depth and by the token counts of :meth:`SpsTable.times`.

        Times of the machine that measured the table: its speed does not change which step is best.
        """
        times = self.table.times(requests)
        return self._corrected(self._table_ms(times, context, slice(None)), requests, times.drafts)

    def single_ms(self, requests: int, drafts: int, depth: int, context: float) -> float:
        """Return the milliseconds of one step that drafts to ``depth`` and verifies ``drafts`` drafts in all."""
        times = self.table.times(requests)
        column = times.column(drafts / requests)
        table_ms = float(self._table_ms(times, context, (depth, column)))
        return float(self._corrected(table_ms, requests, float(times.drafts[column])))

    def _table_ms(self, times: LoadTimes, context: float, step: tuple[int, int] | slice) -> NDArray[np.float64]:
        """Return the milliseconds of steps that verify the likeliest drafts of all requests, from the table."""
        table_ms = times.at(context, step)
        return table_ms + context * times.padding_ms[step] if self._padded else table_ms

    def _corrected(self, table_ms: Any, requests: int, drafts: Any) -> Any:
        """Correct the table's times of steps with so many drafts per request, numbers or arrays."""
        step_filter = self._filters.get(_bucket(requests))
        factor = 1.0 if step_filter is None else np.exp(step_filter.error(drafts))
        return self._total(table_ms * factor, self._of_host_ms(requests))

    def _total(self, device_ms: Any, host_ms: float) -> Any:
        """Return the milliseconds of a step, a number or an array."""
        return np.maximum(device_ms, host_ms) if self._overlapped else device_ms + host_ms

    def _of_host_ms(self, requests: int) -> float:
        """Return the host time of a step at the nearest load that was seen, on the machine that measured the table."""
        if not self._host_ms:
            return 0.0
        bucket = _bucket(requests)
        if bucket not in self._host_ms:
            bucket = min(self._host_ms, key=lambda known: abs(known - bucket))
        return self._host_ms[bucket] * math.exp(-self._speed)

    @property
    def common_factor(self) -> float:
        """Return what the machine takes now in multiples of its times when it measured the table."""
        return math.exp(self._speed)

    def by_drafts(self, requests: int, depth: int, context: float) -> NDArray[np.float64]:
        """Return [requests * depth + 1] milliseconds of steps that draft to ``depth``, by drafts verified."""
        times = self.table.times(requests)
        tokens = np.arange(requests, requests * (depth + 1) + 1)
        return self.step_ms(requests, context)[depth, times.room_for(tokens)]

    def stddev(self, requests: int, drafts: int) -> NDArray[np.float64]:
        """Return the standard deviation, in logarithms, of the time of a step against one of ``drafts`` per request.

        Returns:
            [gamma + 1] by drafts per request. It shrinks with every step of a kind, and grows while there is none.
        """
        step_filter = self._filters.get(_bucket(requests)) or StepTimeFilter(self.table.gamma)
        return step_filter.stddev(drafts)

    def observe(self, kind: StepKind, device_ms: float, host_ms: float | None = None) -> float:
        """Update the times by one measured step.

        Args:
            device_ms: time of the device, which is in the table.
            host_ms: time of the host, between computations or during them. All steps of as many requests are assumed to
                take the same. None if it is a part of ``device_ms``, because each row costs the host as well.

        Returns:
            The milliseconds that were expected, the machine's speed included.
        """
        self._num_steps += 1
        bucket = _bucket(kind.requests)
        if bucket not in self._filters:
            self._filters[bucket] = StepTimeFilter(self.table.gamma)
        step_filter = self._filters[bucket]
        times = self.table.times(kind.requests)
        column = times.room_for(kind.num_tokens)
        drafts, table_ms = float(times.drafts[column]), float(self._table_ms(times, kind.context, (kind.depth, column)))
        expected = step_filter.observe(drafts, math.log(max(device_ms, 1e-3) / table_ms), self._num_steps)
        self._speed = step_filter.speed
        mean_host_ms = self._host_ms.setdefault(bucket, host_ms or 0.0)
        if host_ms is None:
            host_ms = mean_host_ms
        else:
            self._host_ms[bucket] += _HOST_WEIGHT * min(host_ms - mean_host_ms, _MAX_HOST_RISE_MS)
        predicted_ms = float(self._total(table_ms * math.exp(step_filter.error(drafts)), mean_host_ms))
        self._weight = 0.98 * self._weight + 1
        self.measured_ms += (float(self._total(device_ms, host_ms)) - self.measured_ms) / self._weight
        self.predicted_ms += (predicted_ms - self.predicted_ms) / self._weight
        return float(self._total(table_ms * math.exp(expected), mean_host_ms))

    def report(self) -> dict[str, Any]:
        """Return JSON for the statistics.

        By requests (powers of two): ``host_ms`` of a step; ``correction``, factors on the table by drafts.
        """
        seen = self._num_steps > 0
        grid = np.arange(self.table.gamma + 1.0)
        return {
            "measured_ms": self.measured_ms if seen else None,
            "predicted_ms": self.predicted_ms if seen else None,
            "common_factor": self.common_factor,
            "host_ms": {str(1 << bucket): round(ms, 3) for bucket, ms in sorted(self._host_ms.items())},
            "correction": {
                str(1 << bucket): np.exp(step_filter.error(grid)).round(4).tolist()
                for bucket, step_filter in sorted(self._filters.items())
            },
        }


class StepTimeFilter:
    """A Kalman filter for the times of steps of about so many requests.

    Its state is the machine's speed, and the table's error for every number of drafts per request. A step shows only
    their sum. While all steps are of one kind, the speed accounts for it; another kind now and then separates them.
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
        """Return the logarithm of the correction by drafts per request, a number or an array, interpolated."""
        return np.interp(drafts, self._grid, self._mean[1:])

    def stddev(self, drafts: int) -> NDArray[np.float64]:
        """Return [gamma + 1] the standard deviation of the error against that of ``drafts`` drafts per request."""
        variances, shared = self._variances[1:], self._covariance[1 + drafts, 1:]
        return np.sqrt(np.maximum(variances + variances[drafts] - 2 * shared, 0.0))

    def observe(self, drafts: float, log_ratio: float, step: int) -> float:
        """Account for a step that took ``exp(log_ratio)`` times what the table says.

        Returns:
            The logarithm that was expected.
        """
        self._variances += self._drift
        # Less is known of the machine's speed after steps with other loads.
        elsewhere = step - self._last_step - 1
        self._variances[0] = min(self._variances[0] + elsewhere * self._drift[0], _SPEED**2)
        self._last_step = step
        # A step shows the speed, and the errors of the two whole numbers of drafts next to its own.
        seen = np.concatenate([[1.0], np.maximum(1 - np.abs(self._grid - drafts), 0.0)])
        shared = self._covariance @ seen
        expected = float(seen @ self._mean)
        variance = float(seen @ shared) + _NOISE**2
        # Outliers are slow steps: one that is too fast shows that the table is wrong, by as much as it may be.
        surprise = min(max(log_ratio - expected, -_MAX_DEVIATION * math.sqrt(variance)), _MAX_DEVIATION * _NOISE)
        gain = shared / variance
        self._mean += gain * surprise
        errors = self._mean[1:]
        np.clip(errors, -_MAX_ERROR, _MAX_ERROR, out=errors)
        self._covariance -= gain[:, None] * shared
        return expected


def _bucket(requests: int) -> int:
    """Return the index of the power of two nearest to ``requests``."""
    return round(math.log2(requests))


UPDATE_S = 0.005
"""Seconds between two updates of the step times while steps repeat: one takes 0.04 ms, 1 % of the host's time then."""


class StepClock:
    """Measures steps, and updates the step times.

    Args:
        lag: steps that the device may be behind when the next one is chosen: the time between two choices is that of
            the step so many before. If it is behind, host and device work side by side.
        synchronous: whether the stages of a step are done when their call returns, as on a CPU. What a GPU takes for
            them, :meth:`processed` says.

    Attributes:
        last: the step that was measured last; None if it could not be.
    """

    def __init__(self, lag: int, *, synchronous: bool) -> None:
        self.last: TimedStep | None = None
        self._synchronous = synchronous
        self._kinds: deque[StepKind | None] = deque([None] * (lag + 1), maxlen=lag + 1)
        self._entered = self._staging = self._waited_ms = 0.0
        self._device_ms: float | None = None
        self._awaited = False
        # The last step that updated the step times.
        self._updated: tuple[int, int, int] | None = None
        self._updated_at, self._expected_ms = 0.0, 0.0

    @property
    def overlapped(self) -> bool:
        """Return whether host and device work side by side."""
        return len(self._kinds) > 1

    def start_step(self, times: StepTimes | None, *, awaited: bool = False) -> None:
        """Measure the last step: the next one is about to be chosen.

        Args:
            awaited: the host has waited for the result of the last step, although it usually works in parallel with the
                device, and has looked at each row of it. The time between two such choices is all of that step's time.
                Without overlap it always waits, and this changes nothing.
        """
        awaited = awaited and self.overlapped
        if awaited != self._awaited:
            self.invalidate()
            self._awaited = awaited
        now, kind = time.perf_counter(), self._kinds[-1 if awaited else 0]
        self.last = None if kind is None else self._time(kind, now, times)
        self._entered, self._waited_ms, self._device_ms = now, 0.0, None

    def _time(self, kind: StepKind, now: float, times: StepTimes | None) -> TimedStep:
        device_ms, period_ms = self._device_ms, (now - self._entered) * 1e3
        if times is None or (device_ms is None and not self._awaited):
            return TimedStep(kind.requests, period_ms, None)
        step = kind.requests, kind.num_tokens, kind.depth
        if step != self._updated or now - self._updated_at >= UPDATE_S:
            if self._awaited:
                self._expected_ms = times.observe(kind, period_ms)
            else:
                assert device_ms is not None, "checked above"
                spent_ms = self._waited_ms if self.overlapped else device_ms
                self._expected_ms = times.observe(kind, device_ms, max(0.0, period_ms - spent_ms))
            self._updated, self._updated_at = step, now
        return TimedStep(kind.requests, period_ms, self._expected_ms)

    def processed(self, device_ms: float, waited_ms: float) -> None:
        """Take the time of a GPU, now that the host has read the result of the step that is measured next.

        Args:
            device_ms: from the step's first launch to the end of its last.
            waited_ms: how long the host had to wait for that.
        """
        self._device_ms = device_ms
        self._waited_ms += waited_ms

    def decided(self) -> None:
        """Start the time of the stages: the step is chosen."""
        self._staging = time.perf_counter()

    def end_step(self, kind: StepKind | None) -> None:
        """End the step, which has committed; its kind is None if its time says nothing about other steps."""
        self._kinds.append(kind)
        if self._synchronous:
            self._device_ms = (time.perf_counter() - self._staging) * 1e3

    def invalidate(self) -> None:
        """Forget earlier steps: something else runs, and the time until the next step is not a step's."""
        self._kinds.extend([None] * len(self._kinds))
