"""Acceptance by position in the block, as observed: the survival estimate of drafters without a confidence head."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from sglang_dspark.calibration.survival import reached, survived

# Older drafts count for less: a position remembers about this many.
_MEMORY = 500.0
# Before any draft was judged: as many pseudo-drafts, accepted at this rate.
_PRIOR_RATE, _PRIOR_COUNT = 0.7, 4.0


class PositionAcceptance:
    """Running share of drafts accepted at each position, among those whose predecessors were all accepted."""

    def __init__(self, gamma: int) -> None:
        self._judged = np.full(gamma, _PRIOR_COUNT)
        self._accepted = np.full(gamma, _PRIOR_COUNT * _PRIOR_RATE)

    def observe(self, verified: NDArray[np.int64], accepted: NDArray[np.int64]) -> None:
        """Add rounds: [n] drafts verified and [n] accepted."""
        judged = reached(verified, accepted, len(self._judged))
        kept = judged & survived(accepted, len(self._judged))
        count = judged.sum(0)
        keep = np.exp(-count / _MEMORY)
        self._judged = self._judged * keep + count
        self._accepted = self._accepted * keep + kept.sum(0)

    def conditional(self) -> NDArray[np.float64]:
        """[gamma] probability that a draft is accepted, given that all before it are."""
        return self._accepted / self._judged
