"""Track the acceptance of single requests, so that those are left out whose text is beyond the drafter."""

import math
from collections.abc import Hashable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

# The newest round of a request weighs at least this much: older text says less about what comes next.
_MIN_WEIGHT = 1 / 32
# A finding about a request counts at so many standard errors: text of one kind gives blocks of many kinds, and a
# request that is worth drafting by a little must not be given up for a few bad ones.
_NUM_ERRORS = 2.0
# Steps after which a request that was left out is drafted again, in case its text got easier: 1.5 % of its steps.
RETRY_STEPS = 64
# Accepted drafts: standard deviation of the rounds of a request before there are two.
_FIRST_STDDEV = 1.5
_CAPACITY = 4096  # bounds the memory of a server with CUDA graphs, which only observes


@dataclass
class _Acceptance:
    """Running mean and variance of the accepted drafts per round of a request."""

    rounds: int = 0
    mean: float = 0.0
    variance: float = _FIRST_STDDEV**2

    def add(self, accepted: float) -> None:
        self.rounds += 1
        surprise = accepted - self.mean
        self.mean += max(1 / self.rounds, _MIN_WEIGHT) * surprise
        rate = max(1 / (self.rounds + 1), _MIN_WEIGHT)
        self.variance += rate * (surprise * (accepted - self.mean) - self.variance)

    @property
    def uncertainty(self) -> float:
        return _NUM_ERRORS * math.sqrt(self.variance / min(self.rounds, 1 / _MIN_WEIGHT))


class RequestAcceptance:
    """Expected accepted drafts per round of every running request, by what became of its own blocks."""

    def __init__(self) -> None:
        self._by_request: dict[Hashable, _Acceptance] = {}
        self._idle_steps: dict[Hashable, int] = {}  # of requests that are left out

    def worth_drafting(self, requests: Sequence[Hashable], minimum: float) -> list[int]:
        """Return the indices of the requests of which ``minimum`` drafts per round may be accepted.

        A request that is below that by two standard errors is left out for :data:`RETRY_STEPS` steps. Requests that
        are not among ``requests`` are forgotten.
        """
        present = set(requests)
        if not self._by_request.keys() <= present:
            self._by_request = {key: known for key, known in self._by_request.items() if key in present}
        below = (key for key, known in self._by_request.items() if known.mean + known.uncertainty < minimum)
        idle = {key: self._idle_steps.get(key, 0) for key in below}
        self._idle_steps = {key: steps + 1 for key, steps in idle.items() if steps < RETRY_STEPS}
        if not self._idle_steps:
            return list(range(len(requests)))
        return [index for index, key in enumerate(requests) if key not in self._idle_steps]

    def num_rounds(self, request: Hashable) -> int:
        """Return how many rounds of ``request`` were observed."""
        known = self._by_request.get(request)
        return 0 if known is None else known.rounds

    def observe(self, requests: Sequence[Hashable], survival: NDArray[np.float64]) -> None:
        """Add a round of each request.

        Args:
            survival: [n, depth] survivals as the outcome has shown them, NaN past the drafted depth.
        """
        for key, accepted in zip(requests, np.nansum(survival, axis=1).tolist(), strict=True):
            known = self._by_request.pop(key, None) or _Acceptance()
            known.add(accepted)
            self._by_request[key] = known
        while len(self._by_request) > _CAPACITY:
            del self._by_request[next(iter(self._by_request))]  # observed least recently
