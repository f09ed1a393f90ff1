"""How long decode steps take, from the choice of one to the choice of the next."""

from __future__ import annotations

import time
from collections import deque
from dataclasses import dataclass

from sglang_dspark.scheduling.step_times import StepKind, StepTimes

UPDATE_S = 0.005
"""Seconds between two lessons while steps repeat: one takes 0.04 ms, a tenth of the host's share of a step."""


@dataclass(frozen=True)
class TimedStep:
    """How long a step of so many requests took, and what was expected; None without measured step times."""

    requests: int
    measured_ms: float
    expected_ms: float | None


class StepClock:
    """Takes the time of steps, and tells what is known of step times.

    Args:
        lag: steps that the device may be behind when the next one is chosen: the time between two choices is that of
            the step so many before. Where it is behind, host and device work side by side.
        synchronous: whether the stages of a step are done when their call returns, as on a CPU. What a GPU takes for
            them, :meth:`processed` tells.

    Attributes:
        last: the step whose time was taken last, None where there was none to take.
    """

    def __init__(self, lag: int, *, synchronous: bool) -> None:
        self.last: TimedStep | None = None
        self._synchronous = synchronous
        self._kinds: deque[StepKind | None] = deque([None] * (lag + 1), maxlen=lag + 1)
        self._entered = self._staging = self._waited_ms = 0.0
        self._device_ms: float | None = None
        # Of the last step that was learned from.
        self._taught: tuple[int, int, int] | None = None
        self._taught_at, self._expected_ms = 0.0, 0.0

    @property
    def overlapped(self) -> bool:
        """Return whether host and device work side by side."""
        return len(self._kinds) > 1

    def start_step(self, times: StepTimes | None) -> None:
        """A step is about to be chosen: the one behind is over."""
        now, kind = time.perf_counter(), self._kinds[0]
        self.last = None if kind is None else self._time(kind, now, times)
        self._entered, self._waited_ms, self._device_ms = now, 0.0, None

    def _time(self, kind: StepKind, now: float, times: StepTimes | None) -> TimedStep:
        device_ms, period_ms = self._device_ms, (now - self._entered) * 1e3
        if times is None or device_ms is None:
            return TimedStep(kind.requests, period_ms, None)
        step = kind.requests, kind.num_tokens, kind.depth
        if step != self._taught or now - self._taught_at >= UPDATE_S:
            spent_ms = self._waited_ms if self.overlapped else device_ms
            self._expected_ms = times.observe(kind, device_ms, max(0.0, period_ms - spent_ms))
            self._taught, self._taught_at = step, now
        return TimedStep(kind.requests, period_ms, self._expected_ms)

    def processed(self, device_ms: float, waited_ms: float) -> None:
        """The host has read what a GPU has done: of the step that is timed when the next one is chosen.

        Args:
            device_ms: from the step's first launch to the end of its last.
            waited_ms: how long the host had to wait for that.
        """
        self._device_ms = device_ms
        self._waited_ms += waited_ms

    def decided(self) -> None:
        """The step is chosen."""
        self._staging = time.perf_counter()

    def end_step(self, kind: StepKind | None) -> None:
        """The step has committed.

        Args:
            kind: of step; None where its time would teach nothing.
        """
        self._kinds.append(kind)
        if self._synchronous:
            self._device_ms = (time.perf_counter() - self._staging) * 1e3

    def invalidate(self) -> None:
        """Something other than a decode step runs: the time until the next one is not a step's."""
        self._kinds.extend([None] * len(self._kinds))
