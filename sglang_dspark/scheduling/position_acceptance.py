"""Acceptance by position in the block, as observed: the survival estimate of drafters without a confidence head."""

import numpy as np
from numpy.typing import NDArray

from sglang_dspark.calibration.survival import reached, survived
from sglang_dspark.scheduling.lagged_survival import PRIOR_ACCEPTANCE, PRIOR_ROUNDS, WINDOW_ROUNDS


class PositionAcceptance:
    """Running share of drafts accepted at each position, among those whose predecessors were all accepted."""

    def __init__(self, gamma: int) -> None:
        self._judged = np.full(gamma, float(PRIOR_ROUNDS))
        self._accepted = np.full(gamma, PRIOR_ROUNDS * PRIOR_ACCEPTANCE)

    def observe(self, verified: NDArray[np.int64], accepted: NDArray[np.int64]) -> None:
        """Add rounds: [n] drafts verified and [n] accepted. Older drafts count for less."""
        judged = reached(verified, accepted, len(self._judged))
        kept = judged & survived(accepted, len(self._judged))
        count = judged.sum(0)
        keep = np.exp(-count / WINDOW_ROUNDS)
        self._judged = self._judged * keep + count
        self._accepted = self._accepted * keep + kept.sum(0)

    def conditional(self) -> NDArray[np.float64]:
        """Return [gamma] the probability that a draft is accepted, given that all before it are."""
        return self._accepted / self._judged
