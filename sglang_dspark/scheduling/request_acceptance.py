"""Requests that are not worth drafting: their text is beyond the drafter, and a block costs more than it brings."""

from __future__ import annotations

import math
from collections.abc import Hashable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

# A request's newest round weighs at least this much: older text says less about what comes next.
_LEAST_RATE = 1 / 32
# What is found about a request counts when it is sure by so many standard errors: text of one kind gives blocks of many
# kinds, and a request that is worth drafting by a little must not be given up for a few bad ones.
_SURE = 2.0
# Standard deviation of a request's rounds, before there are two: as of one round.
_SPREAD = 1.0
# A request that was given up is drafted again after so many steps, in case its text got easier.
RETRY_STEPS = 64
# Rounds of a request in which next to nothing is known of it.
_FIRST_ROUNDS = 4
# Requests that are remembered before those that have ended are dropped: a server with CUDA graphs only observes.
_CAPACITY = 4096


@dataclass
class _Gain:
    """Running mean and variance of what the rounds of a request bring."""

    rounds: int = 0
    mean: float = 0.0
    variance: float = _SPREAD**2

    def add(self, gain: float) -> None:
        self.rounds += 1
        surprise = gain - self.mean
        self.mean += max(1 / self.rounds, _LEAST_RATE) * surprise
        rate = max(1 / (self.rounds + 1), _LEAST_RATE)
        self.variance += rate * (surprise * (gain - self.mean) - self.variance)

    @property
    def uncertainty(self) -> float:
        return _SURE * math.sqrt(self.variance / min(self.rounds, 1 / _LEAST_RATE))


class RequestAcceptance:
    """Expected accepted drafts per round of every running request, by the survivals of its own blocks."""

    def __init__(self) -> None:
        self._gains: dict[Hashable, _Gain] = {}
        self._idle_steps: dict[Hashable, int] = {}  # of those that are left out

    def worth_drafting(self, requests: Sequence[Hashable], least: float) -> list[int]:
        """Places in ``requests`` of those that may bring ``least`` accepted drafts per round.

        A request that surely brings less is left out until :data:`RETRY_STEPS` have passed. Requests that are not among
        ``requests`` are forgotten.
        """
        gains, present = self._gains, set(requests)
        if not gains.keys() <= present:
            self._gains = gains = {key: gain for key, gain in gains.items() if key in present}
        poor = (key for key, gain in gains.items() if gain.mean + gain.uncertainty < least)
        idle = {key: self._idle_steps.get(key, 0) for key in poor}
        self._idle_steps = {key: steps + 1 for key, steps in idle.items() if steps < RETRY_STEPS}
        if not self._idle_steps:
            return list(range(len(requests)))
        return [place for place, key in enumerate(requests) if key not in self._idle_steps]

    def is_new(self, request: Hashable) -> bool:
        """Return whether next to nothing is known of ``request``."""
        gain = self._gains.get(request)
        return gain is None or gain.rounds < _FIRST_ROUNDS

    def above(self, request: Hashable, least: float) -> bool:
        """Return whether the rounds of ``request`` have shown that it brings ``least`` accepted drafts per round."""
        gain = self._gains.get(request)
        return gain is not None and gain.mean - gain.uncertainty >= least

    def observe(self, requests: Sequence[Hashable], survival: NDArray[np.float64]) -> None:
        """Add a round of each request.

        Args:
            survival: [n, depth] calibrated survivals, NaN past the drafted depth.
        """
        for key, gain in zip(requests, np.nansum(survival, axis=1).tolist(), strict=True):
            known = self._gains.pop(key, None) or _Gain()
            known.add(gain)
            self._gains[key] = known
        while len(self._gains) > _CAPACITY:
            del self._gains[next(iter(self._gains))]  # observed least recently
