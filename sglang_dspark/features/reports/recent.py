"""The last minute of a server."""

from __future__ import annotations

import time
from bisect import bisect_left
from collections import deque
from collections.abc import Callable
from typing import TypedDict

from sglang_dspark.features.reports.counters import Counters
from sglang_dspark.features.reports.sums import Sums, SumsLists

RECENT_S = 60
"""Seconds that recent figures cover."""


class Span(TypedDict):
    """The sums of some seconds as JSON, and their rate."""

    seconds: float
    tokens_per_s: float
    sums: SumsLists


class Recent:
    """Keeps the sums as they were at the start of every second, so that the last minute is a difference.

    Args:
        counters: what is kept.
        clock: seconds, monotonic.
    """

    def __init__(self, counters: Counters, clock: Callable[[], float] = time.monotonic) -> None:
        self._counters, self._clock = counters, clock
        self._start = clock()
        self._seconds: deque[tuple[int, Sums]] = deque([(int(self._start), counters.sums())], maxlen=RECENT_S + 1)

    @property
    def uptime_s(self) -> float:
        """Return the seconds since the start."""
        return self._clock() - self._start

    def tick(self) -> None:
        """Keep the sums if a new second has begun; call this before a step is counted."""
        second = int(self._clock())
        if second != self._seconds[-1][0]:
            self._seconds.append((second, self._counters.sums()))

    def report(self) -> Span:
        """Return the last minute, or the time since the start if that is shorter."""
        now = self._clock()
        first = max(int(now) - RECENT_S + 1, int(self._start))
        seconds = now - max(first, self._start)
        sums = self._counters.sums()
        sums = sums - self._at(first, sums)
        rate = sums.total().committed / max(seconds, 1e-9)
        return {"seconds": seconds, "tokens_per_s": rate, "sums": sums.lists()}

    def _at(self, second: int, now: Sums) -> Sums:
        """Return the sums at the start of ``second``. A second without a step has those of the next one that has."""
        index = bisect_left(self._seconds, second, key=lambda entry: entry[0])
        return self._seconds[index][1] if index < len(self._seconds) else now
