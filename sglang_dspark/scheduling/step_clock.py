"""How long decode steps take, from the choice of one to the choice of the next."""

from __future__ import annotations

import time
from collections import deque
from dataclasses import dataclass

from sglang_dspark.scheduling.step_times import StepKind, StepTimes


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
            the step so many before.
        synchronous: whether the stages of a step are done when their call returns, as on a CPU. Then the rest of the
            time until the next step is the host's. A GPU works on while the host goes on, and how much of the host's
            time it waits for does not show here.

    Attributes:
        last: the step whose time was taken last, None where there was none to take.
    """

    def __init__(self, lag: int, *, synchronous: bool) -> None:
        self.last: TimedStep | None = None
        self._synchronous = synchronous
        self._kinds: deque[StepKind | None] = deque([None] * (lag + 1), maxlen=lag + 1)
        self._entered = self._staging = 0.0
        self._staged_ms: float | None = None

    def enter(self, times: StepTimes | None) -> None:
        """A step is about to be chosen: the one behind is over."""
        now, kind = time.perf_counter(), self._kinds[0]
        self.last = None if kind is None else self._time(kind, (now - self._entered) * 1e3, times)
        self._entered = now

    def _time(self, kind: StepKind, measured_ms: float, times: StepTimes | None) -> TimedStep:
        host_ms = 0.0 if self._staged_ms is None else max(0.0, measured_ms - self._staged_ms)
        expected_ms = None if times is None else times.observe(kind, measured_ms, host_ms)
        return TimedStep(kind.requests, measured_ms, expected_ms)

    def begin_stages(self) -> None:
        """The step is chosen."""
        self._staging = time.perf_counter()

    def done(self, kind: StepKind | None) -> None:
        """The step has committed.

        Args:
            kind: of step; None where its time would teach nothing.
        """
        self._kinds.append(kind)
        if self._synchronous:
            self._staged_ms = (time.perf_counter() - self._staging) * 1e3

    def interrupt(self) -> None:
        """Something other than a decode step runs: the time until the next one is not a step's."""
        self._kinds.extend([None] * len(self._kinds))
