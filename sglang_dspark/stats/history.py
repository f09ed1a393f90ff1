"""The last minutes of a server, second by second."""

from __future__ import annotations

import time
from bisect import bisect_left
from collections import deque
from collections.abc import Callable
from typing import Any

from sglang_dspark.stats.counters import Counters
from sglang_dspark.stats.sums import Figures, Sums

RECENT_S = 60
"""Seconds that recent figures cover."""
HISTORY_S = 300
"""Seconds that are kept."""


class History:
    """Keeps the sums as they were at the start of every second, so that any span of whole seconds is a difference.

    Args:
        counters: what is kept.
        clock: seconds, monotonic.
    """

    def __init__(self, counters: Counters, clock: Callable[[], float] = time.monotonic) -> None:
        self._counters, self._clock = counters, clock
        self._start = clock()
        # A second without a step needs no entry: its sums are those of the next second that has one.
        self._seconds: deque[tuple[int, Sums]] = deque([(int(self._start), counters.sums())], maxlen=HISTORY_S + 1)

    @property
    def uptime_s(self) -> float:
        """Seconds since the start."""
        return self._clock() - self._start

    def tick(self) -> None:
        """To be called before a step is counted."""
        second = int(self._clock())
        if second != self._seconds[-1][0]:
            self._seconds.append((second, self._counters.sums()))

    def report(self) -> dict[str, Any]:
        """JSON: figures since the start, and those of the last seconds as ``recent``."""
        now, sums = self._clock(), self._counters.sums()
        return {
            "uptime_s": now - self._start,
            **sums.report(),
            "steps_by_policy": dict(self._counters.steps_by_policy),
            "recent": self._recent(now, sums),
        }

    def recent(self) -> dict[str, Any]:
        """JSON: the figures of the last :data:`RECENT_S` seconds, with rates per second."""
        return self._recent(self._clock(), self._counters.sums())

    def _recent(self, now: float, sums: Sums) -> dict[str, Any]:
        first = max(int(now) - RECENT_S + 1, int(self._start))
        seconds = now - max(first, self._start)
        part = sums - self._at(first, sums)
        return {"seconds": seconds, **_rates(part.total(), seconds), **part.report()}

    def series(self, seconds: int) -> list[dict[str, Any]]:
        """JSON: counts, means and rates of the last whole seconds, oldest first; the one under way is left out.

        ``second`` counts from the server's start. At most :data:`HISTORY_S` of them.
        """
        now, sums = self._clock(), self._counters.sums()
        last = int(now)
        first = max(last - min(seconds, HISTORY_S), int(self._start) + 1)
        points, before = [], self._at(first, sums)
        for second in range(first, last):
            after = self._at(second + 1, sums)
            figures = Figures((after.loads - before.loads).sum(0))
            passed = second - int(self._start)
            points.append({"second": passed, **_rates(figures, 1.0), **figures.counts(), **figures.means()})
            before = after
        return points

    def _at(self, second: int, now: Sums) -> Sums:
        """The sums at the start of ``second``."""
        index = bisect_left(self._seconds, second, key=lambda entry: entry[0])
        return self._seconds[index][1] if index < len(self._seconds) else now


def _rates(figures: Figures, seconds: float) -> dict[str, float]:
    span = max(seconds, 1e-9)
    return {"tokens_per_s": figures.committed / span, "steps_per_s": figures.steps / span}
