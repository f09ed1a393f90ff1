"""Makes probabilities of simulated acceptance, which differ from draft to draft, from given rates.

The probability of a draft is a quantile of a beta distribution of its slot. Half of the
drafts have a quantile of their own; the others share that of a stretch of the text
(``dspark_kernels.acceptance.simulation``). Where a text is hard, blocks are short and many, so the rate at which drafts
of a slot are kept lies below the mean of its distribution. The means are therefore fitted, by the exact chain of slots
along a text whose blocks are verified whole.
"""

from collections.abc import Sequence

import numpy as np
from dspark_kernels import QUANTILES, SPAN
from numpy.typing import NDArray

Rates = NDArray[np.float64]

BETA = 0.45
"""Second parameter of the beta distributions: with it, confidences tell kept drafts from others as well as those of
trained heads do, for chat, code and mathematics (AUC 0.84 to 0.89)."""
_ROUNDS = 30


def acceptance_probabilities(rates: Sequence[float]) -> NDArray[np.float32]:
    """Return [gamma, QUANTILES] probabilities by slot and quantile, ascending.

    Args:
        rates: of keeping a draft, by slot, when all before it are kept.
    """
    wanted = np.asarray(rates, dtype=np.float64)
    means = wanted
    for _ in range(_ROUNDS):
        missing = wanted - kept_rates(_quantiles(means))
        means = np.where((wanted > 0) & (wanted < 1), np.clip(means + missing, 1e-3, 1 - 1e-3), wanted)
    return _quantiles(means).astype(np.float32)


def kept_rates(quantiles: Rates) -> Rates:
    """Return [gamma] rates of keeping a draft, by slot, when all before it are kept: of whole blocks of a long text."""
    gamma = len(quantiles)
    kept = (quantiles + quantiles.mean(axis=1, keepdims=True)).T / 2  # [QUANTILES, gamma], of a stretch's quantile
    # From position to position: to the next slot if the draft is kept, else, or after the bonus token, to the first.
    chain = np.zeros((QUANTILES, gamma + 1, gamma + 1))
    slots = np.arange(gamma)
    chain[:, slots, slots + 1] = kept
    chain[:, :, 0] += 1 - chain.sum(axis=2)
    at_start = np.full(gamma + 1, 1 / (gamma + 1))
    for _ in range(gamma + 2):  # stretches, after which the start is forgotten
        at_start = at_start @ np.linalg.matrix_power(chain, SPAN).mean(axis=0)
    here, reached = np.tile(at_start, (QUANTILES, 1)), np.zeros((QUANTILES, gamma))
    for _ in range(SPAN):
        reached += here[:, :gamma]
        here = np.einsum("qi,qij->qj", here, chain)
    total = reached.sum(axis=0)
    return np.divide((reached * kept).sum(axis=0), total, out=quantiles.mean(axis=1), where=total > 0)


def _quantiles(means: Rates) -> Rates:
    from scipy.special import betaincinv

    inside, places = np.clip(means[:, None], 1e-3, 1 - 1e-3), (np.arange(QUANTILES) + 0.5) / QUANTILES
    drawn = betaincinv(BETA * inside / (1 - inside), BETA, places)
    return np.where((means[:, None] > 0) & (means[:, None] < 1), drawn, means[:, None])
