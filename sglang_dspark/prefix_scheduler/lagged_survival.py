"""What a verify budget is worth, estimated from the survivals of earlier steps (DSpark, 5.2).

The budget of a step has to be fixed before its drafts are drawn, or it would depend on them. So it is chosen by the
survivals of earlier rounds: the last rounds are dealt into imagined batches of the present size, and a budget of K
drafts is worth the mean, over these batches, of the sum of their K largest survivals.
"""

from __future__ import annotations

import numpy as np

from sglang_dspark.prefix_scheduler.sps_table import Array

MIN_ROUNDS = 256
"""Rounds that an estimate averages over, at least: a standard error of about 4 % of the expected accepted drafts."""
# Before the first round: a middling drafter, so that a new server starts by speculating and then sees for itself.
_PRIOR_CONFIDENCE = 0.7


class LaggedSurvivals:
    """The survivals of the last drafted rounds, whichever requests they belonged to.

    Args:
        gamma: drafts per block.
        depths: block depths that :meth:`gains` tells apart, ascending, the last one gamma.
    """

    def __init__(self, gamma: int, depths: tuple[int, ...]) -> None:
        self.depths = depths
        self._rounds = np.tile(_PRIOR_CONFIDENCE ** np.arange(1.0, gamma + 1), (MIN_ROUNDS, 1))
        self._gains: dict[int, Array] = {}

    def observe(self, survival: Array) -> None:
        """Append rounds [n, gamma] of calibrated survivals, whole blocks or blocks cut short.

        A cut block says nothing about the positions past its end (NaN there): they are filled with the mean ratio of
        the rounds at hand.
        """
        if np.isnan(survival).any():
            mean = self._rounds[-MIN_ROUNDS:].mean(0)
            ratio = mean[1:] / np.maximum(mean[:-1], 1e-9)
            survival = survival.copy()
            for position in range(1, survival.shape[1]):
                column, before = survival[:, position], survival[:, position - 1]
                np.copyto(column, before * ratio[position - 1], where=np.isnan(column))
        self._rounds = np.concatenate([self._rounds, survival])[-max(MIN_ROUNDS, len(survival)) :]
        self._gains.clear()

    def mean(self) -> Array:
        """[gamma] mean survival by position over the rounds that estimates use."""
        mean: Array = self._rounds[-MIN_ROUNDS:].mean(0)
        return mean

    def gains(self, requests: int) -> Array:
        """[depths, requests * gamma + 1] expected accepted drafts of a batch by block depth and budget.

        A budget past ``requests * depth`` is worth no more than that.
        """
        if requests not in self._gains:
            self._gains[requests] = self._estimate(requests)
        return self._gains[requests]

    def _estimate(self, requests: int) -> Array:
        gamma = self._rounds.shape[1]
        num_batches = max(1, MIN_ROUNDS // requests)
        rounds = self._rounds[-num_batches * requests :]
        if len(rounds) < num_batches * requests:
            rounds = np.tile(rounds, (-(-num_batches * requests // len(rounds)), 1))[: num_batches * requests]
        batches = rounds.reshape(num_batches, requests, gamma)
        gains = np.empty((len(self.depths), requests * gamma + 1))
        gains[:, 0] = 0.0
        for row, depth in zip(gains, self.depths, strict=True):
            best_first = -np.sort(-batches[:, :, :depth].reshape(num_batches, -1), axis=1)
            worth = best_first.mean(0).cumsum()
            row[1 : len(worth) + 1] = worth
            row[len(worth) + 1 :] = worth[-1]
        return gains
