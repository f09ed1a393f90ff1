"""The last minutes of a server, second by second."""

from __future__ import annotations

import time
from bisect import bisect_left
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from itertools import islice
from typing import Any

import msgspec
import numpy as np

from sglang_dspark.metrics.counters import Counters
from sglang_dspark.metrics.sums import Figures, Sums

RECENT_S = 60
"""Seconds that recent figures cover."""
HISTORY_S = 300
"""Seconds that are kept."""


@dataclass(frozen=True)
class Snapshot:
    """What a scheduler hands over when it is asked: sums, out of which another process makes the figures.

    Attributes:
        uptime_s: since the server's start.
        sums: since the start.
        recent: of the last :data:`RECENT_S` seconds, or since the start where that is shorter.
        recent_s: how long that is.
        steps_by_policy: decode steps by the policy that chose them.
        first: the first second to be listed, counted from the start; ``last`` is under way and not listed.
        ticks: [n] seconds at whose start sums were kept, ascending.
        rows: float64 of [n + 1, row]: the sums at these times over all loads, and after them those of now.
    """

    uptime_s: float
    sums: Sums
    recent: Sums
    recent_s: float
    steps_by_policy: dict[str, int]
    first: int
    last: int
    ticks: list[int]
    rows: bytes

    def packed(self) -> dict[str, Any]:
        """The same as numbers, texts, lists and bytes, which travel between processes."""
        packed: dict[str, Any] = msgspec.to_builtins(self, builtin_types=(bytes,), enc_hook=np.ndarray.tolist)
        return packed

    @classmethod
    def unpacked(cls, packed: dict[str, Any]) -> Snapshot:
        """The inverse of :meth:`packed`."""
        return msgspec.convert(packed, cls, builtin_types=(bytes,), dec_hook=lambda kind, values: np.asarray(values))

    def report(self) -> dict[str, Any]:
        """JSON: figures since the start, and those of the last seconds as ``recent``."""
        return {
            "uptime_s": self.uptime_s,
            **self.sums.report(),
            "steps_by_policy": self.steps_by_policy,
            "recent": self.recent_report(),
        }

    def recent_report(self) -> dict[str, Any]:
        """JSON: the figures of the last :data:`RECENT_S` seconds, with rates per second."""
        return {"seconds": self.recent_s, **_rates(self.recent.total(), self.recent_s), **self.recent.report()}

    def series(self) -> list[dict[str, Any]]:
        """JSON: counts, means and rates of the last whole seconds, oldest first; the one under way is left out.

        ``second`` counts from the server's start.
        """
        rows = np.frombuffer(self.rows).reshape(len(self.ticks) + 1, -1)
        # A second without a step has no row: its sums are those of the next second that has one.
        starts = rows[[bisect_left(self.ticks, second) for second in range(self.first, self.last + 1)]]
        points = []
        for index, row in enumerate(starts[1:] - starts[:-1]):
            figures = Figures(row)
            point = {"second": self.first + index, **_rates(figures, 1.0), **figures.counts(), **figures.means()}
            points.append(point)
        return points


class History:
    """Keeps the sums as they were at the start of every second, so that any span of whole seconds is a difference.

    Args:
        counters: what is kept.
        clock: seconds, monotonic.
    """

    def __init__(self, counters: Counters, clock: Callable[[], float] = time.monotonic) -> None:
        self._counters, self._clock = counters, clock
        self._start = clock()
        self._seconds: deque[tuple[int, Sums, bytes]] = deque(maxlen=HISTORY_S + 1)
        self._keep(int(self._start))

    @property
    def uptime_s(self) -> float:
        """Seconds since the start."""
        return self._clock() - self._start

    def tick(self) -> None:
        """To be called before a step is counted."""
        second = int(self._clock())
        if second != self._seconds[-1][0]:
            self._keep(second)

    def _keep(self, second: int) -> None:
        sums = self._counters.sums()
        self._seconds.append((second, sums, _row(sums)))

    def snapshot(self, history_s: int = 0) -> Snapshot:
        """The sums up to now, in microseconds however long the history is.

        Args:
            history_s: seconds to list one by one, at most :data:`HISTORY_S`.
        """
        now, sums, start = self._clock(), self._counters.sums(), int(self._start)
        recent = max(int(now) - RECENT_S + 1, start)
        last = int(now)
        first = max(last - min(history_s, HISTORY_S), start + 1)
        # Every second has one entry at most. Nothing is walked through for the thread of the metrics, which lists none.
        latest = islice(reversed(self._seconds), last - first + 1) if history_s else ()
        kept = [entry for entry in latest if entry[0] >= first][::-1]
        return Snapshot(
            uptime_s=now - self._start,
            sums=sums,
            recent=sums - self._at(recent, sums),
            recent_s=now - max(recent, self._start),
            steps_by_policy=dict(self._counters.steps_by_policy),
            first=first - start,
            last=last - start,
            ticks=[second - start for second, _, _ in kept],
            rows=b"".join([*(row for _, _, row in kept), _row(sums)]),
        )

    def _at(self, second: int, now: Sums) -> Sums:
        """The sums at the start of ``second``."""
        index = bisect_left(self._seconds, second, key=lambda entry: entry[0])
        return self._seconds[index][1] if index < len(self._seconds) else now


def full_report(known: dict[str, Any], snapshot: Snapshot, *, with_history: bool) -> dict[str, Any]:
    """JSON of ``GET /dspark/stats``; takes milliseconds for a long history, and belongs in no scheduler.

    Args:
        known: what stands before the figures, ``max_running_requests`` among it.
    """
    report: dict[str, Any] = known | snapshot.report()
    for span in (report, report["recent"]):
        running = span["running_requests"]
        span["occupancy"] = None if running is None else running / known["max_running_requests"]
    return report | {"history": snapshot.series()} if with_history else report


def _row(sums: Sums) -> bytes:
    return sums.loads.sum(0).tobytes()


def _rates(figures: Figures, seconds: float) -> dict[str, float]:
    span = max(seconds, 1e-9)
    return {"tokens_per_s": figures.committed / span, "steps_per_s": figures.steps / span}
