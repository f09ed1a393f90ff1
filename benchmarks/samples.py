"""A test of sampled tokens against the law that they should have, and against other samples.

A target's laws behind every prefix are known. So each token falls into one of a few cells, by its rank under the law of
its place and by a coin of its own, with a probability that is known: what is observed less what is expected is a sum of
martingale differences, whose covariance is known too. Their chi-square statistic uses every token of every answer, and
its power against a given other law needs no simulation.
"""

from __future__ import annotations

from collections.abc import Sequence
from copy import deepcopy
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from scipy.optimize import brentq
from scipy.stats import chi2, ncx2

ALPHA, DISTANCE = 0.001, 0.1
RANKS = (1, 2, 3, 4, 8, 16)  # of the likeliest token 0: where a cell begins
CELLS = 2 * (len(RANKS) + 1)
LEAST_EXPECTED = 8  # in a cell, below which it does not count
_COIN = 2654435761  # an odd number: the high bits of its multiples look like chance


@dataclass(frozen=True)
class Tally:
    """Count tokens by cell.

    Attributes:
        excess: [CELLS] tokens in each, less those that the laws expect.
        expected: [CELLS].
        covariance: [CELLS, CELLS] of the excess, if the laws hold.
        shift: [CELLS] what the excess would be if in each law a tenth of the mass were others' that is the likeliest
            token's (all that it has, if that is less).
        tokens: their number.
    """

    excess: NDArray[np.float64]
    expected: NDArray[np.float64]
    covariance: NDArray[np.float64]
    shift: NDArray[np.float64]
    tokens: int

    @classmethod
    def of(cls, laws: torch.Tensor, tokens: torch.Tensor) -> Tally:
        """Count [n] tokens that [n, V] laws have."""
        ranked = laws.argsort(dim=1, descending=True, stable=True)
        places = torch.arange(laws.shape[1]).expand_as(ranked)
        ranks = torch.empty_like(ranked).scatter_(1, ranked, places)
        coins = torch.arange(laws.shape[1]) * _COIN >> 16 & 1
        cells = 2 * torch.bucketize(ranks, torch.tensor(RANKS), right=True) + coins
        expected = laws.new_zeros(len(laws), CELLS).scatter_add_(1, cells, laws).double().numpy()
        of_tokens = cells.gather(1, tokens[:, None])[:, 0].numpy()
        likeliest = np.eye(CELLS)[cells.gather(1, ranked[:, :1])[:, 0].numpy()]
        most = laws.amax(1, keepdim=True).double().numpy()
        moved = most.clip(max=DISTANCE)  # in proportion to what the others have
        shift = moved / (1 - most).clip(1e-12) * (expected - most * likeliest) - moved * likeliest
        covariance = np.diag(expected.sum(0)) - expected.T @ expected
        excess = np.bincount(of_tokens, minlength=CELLS) - expected.sum(0)
        return cls(excess, expected.sum(0), covariance, shift.sum(0), len(tokens))

    def __add__(self, other: Tally) -> Tally:
        return self._joined(other, 1)

    def __sub__(self, other: Tally) -> Tally:
        """Return how two samples differ, whatever the law of both is; the shift is that of this one alone."""
        return self._joined(other, -1)

    def _joined(self, other: Tally, sign: int) -> Tally:
        return Tally(
            self.excess + sign * other.excess,
            self.expected + other.expected,
            self.covariance + other.covariance,
            self.shift + other.shift if sign > 0 else self.shift,
            self.tokens + other.tokens,
        )

    def report(self) -> dict[str, float]:
        """Return the p-value, and what the test would notice at the level :data:`ALPHA`."""
        degrees, (found, moved) = self._squared(self.excess, self.shift)
        critical = chi2.isf(ALPHA, degrees)
        needed = brentq(lambda size: ncx2.sf(critical, degrees, size) - 0.9, 1e-3, 1e3)
        return {
            "tokens": self.tokens,
            "p_value": round(float(chi2.sf(found, degrees)), 4),
            "alpha": ALPHA,
            f"power_at_{DISTANCE}": round(float(ncx2.sf(critical, degrees, moved)), 4),
            "mass_noticed_with_power_0.9": round(DISTANCE * float(np.sqrt(needed / moved)), 4),
        }

    def _squared(self, *excesses: NDArray[np.float64]) -> tuple[int, list[float]]:
        """Return the rank of the covariance of cells that count, and the excesses squared in its metric."""
        counts = self.expected >= LEAST_EXPECTED
        covariance = self.covariance[np.ix_(counts, counts)]
        inverse = np.linalg.pinv(covariance, rcond=1e-9, hermitian=True)
        rank = int(np.linalg.matrix_rank(covariance, tol=1e-9 * np.abs(covariance).max(), hermitian=True))
        return rank, [float(excess[counts] @ inverse @ excess[counts]) for excess in excesses]


@torch.no_grad()
def next_laws(model: Any, prompt: Sequence[int], answers: Sequence[Sequence[int]]) -> torch.Tensor:
    """Return the laws [answers, n, V] of the tokens of answers of equal length n to one prompt, at temperature 1."""
    known = deepcopy(model(torch.tensor([prompt[:-1]]), use_cache=True).past_key_values)
    known.batch_repeat_interleave(len(answers))
    read = torch.tensor([[prompt[-1], *answer[:-1]] for answer in answers])
    laws: torch.Tensor = model(read, past_key_values=known).logits.softmax(-1)
    return laws


def tally(model: Any, prompt: Sequence[int], answers: Sequence[Sequence[int]]) -> Tally:
    """Count the tokens of such answers by the laws of a target."""
    laws = next_laws(model, prompt, answers)
    return Tally.of(laws.flatten(0, 1), torch.tensor([*answers]).flatten())
