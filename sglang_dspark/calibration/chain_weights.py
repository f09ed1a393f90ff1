"""Weigh copied candidates by what verification has shown of others that matched as well."""

from __future__ import annotations

import numpy as np

from sglang_dspark.calibration.survival import Floats, Ints

WINDOW = 512
"""Candidates that a rate averages over, for each number of matched tokens."""
WORTHY_RATE = 0.6
"""Share of right candidates from which they are drafted: about that of a drafter's tokens whose predecessors are kept.
On texts of the bundled pair, 0.5 and 0.6 were alike, and 0.7 brought 2 % less."""
BOOST = 64.0
"""Nats: the drafter's own token is hardly ever drawn beside the candidate. Boosts that grow with the rate brought less:
a drafter is often sure where it is wrong."""
_DOUBT = 2.0
"""Candidates that were wrong before any was seen, so that a boost of 0 is the start."""


class ChainWeights:
    """Count how often candidates of chains are the target's tokens, by the tokens that match before them.

    A candidate in place j of a chain of n matched tokens stands behind n + j that match, if those before it in the
    chain were right: so chains of all lengths teach each other.

    Args:
        most: matched tokens that are told apart.
    """

    def __init__(self, most: int) -> None:
        self._counts = np.zeros((2, most + 1))  # right, and all
        self._places = np.arange(most + 1)

    def observe(self, matched: Ints, right: Ints, seen: Ints) -> None:
        """Add rounds.

        Whether a place is seen depends on the places before it alone, and the token there is drawn by the target's
        distribution, whatever was drafted: the sample is fair.

        Args:
            matched: [n] tokens that the chain of the round matched, 0 without a chain.
            right: [n] leading committed tokens of the round that are the chain's.
            seen: [n] committed tokens of the round that have a place in the chain.
        """
        most = len(self._places) - 1
        counts = np.zeros_like(self._counts)
        has_chain = matched > 0
        for place in range(int(seen.max(initial=0))):
            tested = has_chain & (place < seen) & (place <= right)
            behind = np.minimum(matched[tested] + place, most)
            counts[1] += np.bincount(behind, minlength=most + 1)
            counts[0] += np.bincount(behind, right[tested] > place, minlength=most + 1)
        self._counts = self._counts * np.exp(-counts[1] / WINDOW) + counts

    def rates(self) -> Floats:
        """Return [most + 1] how likely a candidate is right behind so many matched tokens, doubtful at the start."""
        right, all_ = self._counts
        return (right + 0.25) / (all_ + _DOUBT + 0.5)

    def table(self, lengths: int, scale: Floats, shift: Floats) -> Floats:
        """Return [2, lengths, slots] boosts, and the confidence logits that a slot has at least.

        Args:
            lengths: of chains, from 0, for which nothing is asked.
            scale, shift: [slots] of the calibration, which confidence logits go through.
        """
        rates = self.rates()[np.arange(lengths)[:, None] + np.arange(len(scale))]
        boosts = np.where(rates > WORTHY_RATE, BOOST, 0.0)
        boosts[0] = 0.0
        least = (np.log(rates / (1 - rates)) - shift) / scale
        return np.stack([boosts, np.where(boosts > 0, least, -np.inf)])
