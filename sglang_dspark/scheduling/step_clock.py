"""Measures decode steps, from the choice of one to the choice of the next."""

from __future__ import annotations

import time
from collections import deque

from sglang_dspark.scheduling.step_times import StepKind, StepTimes
from sglang_dspark.step.record import TimedStep

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
        """Measure the step behind: the next one is about to be chosen.

        Args:
            awaited: the host has waited for the result of the last step, although it works beside the device usually,
                and has looked at each row of it. The time between two such choices is all of that step's time. Without
                overlap it always waits, and this changes nothing.
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
        """Forget the steps behind: something else runs, and the time until the next step is not a step's."""
        self._kinds.extend([None] * len(self._kinds))
