"""Predicted survivals against what verification observed, by position in the block."""

import numpy as np
from numpy.typing import NDArray


class PredictedSurvival:
    """Sums over verified drafts whose survival was predicted before the outcome was known.

    A draft that was not verified says nothing, and whether it was verified was decided before its outcome: what is
    summed is fair to the predictions.
    """

    def __init__(self, gamma: int) -> None:
        self._positions = np.arange(gamma)
        self._sums = np.zeros((3, gamma))

    def observe(self, survival: NDArray[np.float64], verified: NDArray[np.int64], accepted: NDArray[np.int64]) -> None:
        """Add rounds: [n, gamma] predictions, read up to the [n] verified drafts, and [n] accepted ones."""
        seen = verified[:, None] > self._positions
        # A replaced array, not a changed one: a thread may be reading the sums.
        self._sums = self._sums + np.stack(
            [
                seen.sum(0),
                np.where(seen, survival, 0.0).sum(0),
                (accepted[:, None] > self._positions).sum(0),
            ]
        )

    def sums(self) -> NDArray[np.float64]:
        """[3, gamma] number of drafts, sum of the predictions, drafts that survived; never written to again."""
        return self._sums
