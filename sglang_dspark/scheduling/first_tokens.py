"""Promises of a time to first token: by when prompts that wait have to start."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import inf

# What a request without a promise counts as promised: none of them waits for ever behind others that have one.
PATIENCE_MS = 10_000.0


@dataclass(frozen=True)
class Waiting:
    """A prompt that waits. Times are milliseconds, of any monotonic clock.

    Attributes:
        arrived_ms: when it came.
        ttft_ms: promised time to its first token; None for no promise.
        prefill_ms: that encoding it takes.
    """

    arrived_ms: float
    ttft_ms: float | None = None
    prefill_ms: float = 0.0

    @property
    def start_by_ms(self) -> float:
        """Return when it has to start at the latest."""
        if self.ttft_ms is None:
            return self.arrived_ms + PATIENCE_MS
        return self.arrived_ms + self.ttft_ms - self.prefill_ms


def starts_by(waiting: Sequence[Waiting]) -> list[float]:
    """Return by when each prompt has to start.

    Of prompts without a promise, none has to start before one in front of it: these keep their order, and all of them
    wait no longer than the oldest one may.
    """
    found, oldest = [], inf
    for one in reversed(waiting):
        if one.ttft_ms is None:
            oldest = min(oldest, one.start_by_ms)
        found.append(oldest if one.ttft_ms is None else one.start_by_ms)
    return found[::-1]
