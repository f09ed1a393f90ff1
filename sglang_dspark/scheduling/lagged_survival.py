"""Estimate the value of a verify budget from the survivals of earlier steps (DSpark, 5.2).

The budget of a step has to be fixed before its drafts are drawn, or it would depend on them. So it is chosen by the
survivals of earlier rounds: the last rounds are dealt into imagined batches of the present size, and a budget of K
drafts is worth the mean, over these batches, of the sum of their K largest survivals.
"""

import numpy as np
from numpy.typing import NDArray

WINDOW_ROUNDS = 256
"""Rounds that an estimate averages over: a standard error of about 4 % of the expected accepted drafts. A single batch
if more requests than this run."""
# Before the first round, a middling drafter: conditional acceptance, and rounds that this counts for, few enough to be
# outweighed by the time that a server may park.
PRIOR_ACCEPTANCE, PRIOR_ROUNDS = 0.7, 16


class LaggedSurvivals:
    """The survivals of the last drafted rounds of all requests.

    Args:
        gamma: drafts per block.
        depths: block depths that :meth:`gains` tells apart, ascending, the last one gamma.

    Attributes:
        num_observed: rounds ever observed.
    """

    def __init__(self, gamma: int, depths: tuple[int, ...]) -> None:
        self.depths = depths
        self.num_observed = 0
        self._rounds = np.tile(PRIOR_ACCEPTANCE ** np.arange(1.0, gamma + 1), (PRIOR_ROUNDS, 1))
        self._gains: dict[int, NDArray[np.float64]] = {}

    def observe(self, survival: NDArray[np.float64]) -> None:
        """Append rounds [n, gamma] of calibrated survivals, whole blocks or blocks cut short.

        A cut block says nothing about the positions past its end (NaN there): they are filled with the mean ratio of
        the rounds at hand.
        """
        self._rounds = np.concatenate([self._rounds, self._whole(survival)])[-max(WINDOW_ROUNDS, len(survival)) :]
        self.num_observed += len(survival)
        self._gains.clear()

    def revise(self, survival: NDArray[np.float64]) -> None:
        """Take rounds observed before as they would be predicted now, and forget all others, the prior too."""
        self._rounds = self._whole(survival)
        self._gains.clear()

    def _whole(self, survival: NDArray[np.float64]) -> NDArray[np.float64]:
        """Return ``survival`` with cut blocks completed."""
        if not np.isnan(survival).any():
            return survival
        mean = self.mean()
        ratio = mean[1:] / np.maximum(mean[:-1], 1e-9)
        survival = survival.copy()
        for position in range(1, survival.shape[1]):
            column, before = survival[:, position], survival[:, position - 1]
            np.copyto(column, before * ratio[position - 1], where=np.isnan(column))
        return survival

    def mean(self) -> NDArray[np.float64]:
        """Return [gamma] the mean survival by position over the rounds that estimates use."""
        return self._rounds[-WINDOW_ROUNDS:].mean(0)

    def gains(self, requests: int) -> NDArray[np.float64]:
        """Return [depths, requests * gamma + 1] the expected accepted drafts of a batch by block depth and budget.

        A budget past ``requests * depth`` is worth no more than that.
        """
        if requests not in self._gains:
            self._gains[requests] = self._estimate(requests)
        return self._gains[requests]

    def _estimate(self, requests: int) -> NDArray[np.float64]:
        gamma = self._rounds.shape[1]
        num_batches = max(1, min(WINDOW_ROUNDS, len(self._rounds)) // requests)
        rounds = self._rounds[-num_batches * requests :]
        if len(rounds) < requests:
            rounds = np.resize(rounds, (requests, gamma))
        # Sorted ascending, hence negated. Single precision is enough here, and twice as fast.
        batches = -rounds.reshape(num_batches, requests, gamma).swapaxes(1, 2).astype(np.float32)
        by_depth = np.zeros((len(self.depths), *batches.shape), dtype=np.float32)
        for allowed, depth in zip(by_depth, self.depths, strict=True):
            allowed[:, :depth] = batches[:, :depth]
        worth = by_depth.reshape(len(self.depths), num_batches, -1)
        worth.sort(axis=2)
        gains = np.zeros((len(self.depths), requests * gamma + 1))
        worth.sum(1).cumsum(1, dtype=np.float64, out=gains[:, 1:])
        gains /= -num_batches
        return gains
