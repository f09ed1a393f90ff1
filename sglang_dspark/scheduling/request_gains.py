"""Requests that are not worth drafting: their text is beyond the drafter, and a block costs more than it brings."""

from __future__ import annotations

from collections.abc import Hashable, Sequence

import numpy as np

from sglang_dspark.arrays import Array

# Weight of a request's newest round: it remembers about the last dozen.
_RATE = 1 / 12
# A request that was given up is drafted again after so many steps, in case its text got easier.
RETRY_STEPS = 64
# Requests that are remembered while nobody asks which of them still run: a parked server only observes.
_CAPACITY = 4096


class RequestGains:
    """Expected accepted drafts per round of every running request, a running mean of its blocks' survivals."""

    def __init__(self) -> None:
        self._gains: dict[Hashable, float] = {}
        self._idle_steps: dict[Hashable, int] = {}  # of those that are left out

    def worth_drafting(self, requests: Sequence[Hashable], least: float) -> list[int]:
        """Places in ``requests`` of those that bring at least ``least`` accepted drafts per round.

        A request without history is worth it, and so is one that was left out for :data:`RETRY_STEPS`. Requests that
        are not among ``requests`` are forgotten.
        """
        gains, present = self._gains, set(requests)
        if not gains.keys() <= present:
            self._gains = gains = {key: gain for key, gain in gains.items() if key in present}
        idle = {key: self._idle_steps.get(key, 0) for key, gain in gains.items() if gain < least}
        self._idle_steps = {key: steps + 1 for key, steps in idle.items() if steps < RETRY_STEPS}
        if not self._idle_steps:
            return list(range(len(requests)))
        return [place for place, key in enumerate(requests) if key not in self._idle_steps]

    def observe(self, requests: Sequence[Hashable], survival: Array, typical: float) -> None:
        """Add a round of each request.

        Args:
            survival: [n, depth] calibrated survivals.
            typical: expected accepted drafts of any request's block; where a new request's mean starts.
        """
        for key, gain in zip(requests, np.nansum(survival, axis=1).tolist(), strict=True):
            before = self._gains.pop(key, typical)
            self._gains[key] = before + _RATE * (gain - before)
        while len(self._gains) > _CAPACITY:
            del self._gains[next(iter(self._gains))]  # observed least recently
