"""Weigh copied candidates by what verification has shown of others that matched as well."""

import numpy as np
from dspark_kernels import KIND_ROWS, NUM_ROWS

from sglang_dspark.calibration.survival import Floats, Ints

WINDOW = 512
"""Candidates that a rate averages over, for each number of matched tokens."""
WORTHY_RATE = 0.6
"""Share of right candidates from which they are drafted: about that of a drafter's tokens whose predecessors are kept.
On texts of the bundled pair, 0.5 and 0.6 were alike, and 0.7 brought 2 % less."""
BOOST = 64.0
"""Nats: the drafter's own token is hardly ever drawn beside the candidate. Boosts that grow with the rate brought less:
a drafter is often sure where it is wrong."""
_SEEN, _RIGHT = 2.5, np.array([[0.25], [0.25], [2.0]])
"""Candidates, and right ones of each kind of chain, before any was seen: those that compete weigh nothing at the start,
and those that were asked for are what their request says they are."""


class ChainWeights:
    """Count how often candidates of chains are the target's tokens, by the tokens that match before them.

    A candidate in place j of a chain of n matched tokens stands behind n + j that match, if those before it in the
    chain were right: so chains of all lengths teach each other. Those of one kind do: in thousands of tokens of earlier
    answers short matches mean less, and without them requests draft as if there were none.

    Args:
        most: matched tokens that are told apart.
    """

    def __init__(self, most: int) -> None:
        self._counts = np.zeros((2, len(_RIGHT), most + 1))  # right, and all; by kind
        self._places = np.arange(most + 1)

    def observe(self, rows: Ints, right: Ints, seen: Ints) -> None:
        """Add rounds.

        Whether a place is seen depends on the places before it alone, and the token there is drawn by the target's
        distribution, whatever was drafted: the sample is fair.

        Args:
            rows: [n] rows of the weights that the round's chain had, 0 without a chain.
            right: [n] leading committed tokens of the round that are the chain's.
            seen: [n] committed tokens of the round that have a place in the chain.
        """
        counts = np.zeros_like(self._counts)
        kinds, matched = np.divmod(rows, KIND_ROWS)
        has_chain, lengths = matched > 0, len(self._places)
        num_cells = counts[0].size
        for place in range(int(seen.max(initial=0))):
            tested = has_chain & (place < seen) & (place <= right)
            behind = kinds[tested] * lengths + np.minimum(matched[tested] + place, lengths - 1)
            outcomes = [np.bincount(behind, weights, num_cells) for weights in (right[tested] > place, None)]
            counts += np.reshape(outcomes, counts.shape)
        self._counts = self._counts * np.exp(-counts[1] / WINDOW) + counts

    def rates(self) -> Floats:
        """Return [kinds, most + 1] how likely a candidate is right behind so many matched tokens, by kind."""
        right, seen = self._counts
        return (right + _RIGHT) / (seen + _SEEN)

    def table(self, scale: Floats, shift: Floats) -> Floats:
        """Return [2, NUM_ROWS, slots] boosts, and the confidence logits that a slot has at least.

        Args:
            scale, shift: [slots] of the calibration, which confidence logits go through.
        """
        rates = self.rates()[:, np.arange(KIND_ROWS)[:, None] + np.arange(len(scale))]
        boosts = np.where(rates > WORTHY_RATE, BOOST, 0.0)
        boosts[-1] = BOOST
        boosts[:, 0] = 0.0
        least = np.where(boosts > 0, (np.log(rates / (1 - rates)) - shift) / scale, -np.inf)
        return np.stack([boosts, least]).reshape(2, NUM_ROWS, len(scale))
