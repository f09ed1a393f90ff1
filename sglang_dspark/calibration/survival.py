"""Confidence logits -> conditional acceptance -> prefix survival, and the outcome that it is compared with."""

from typing import Any

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.floating[Any]]
Ints = npt.NDArray[np.integer[Any]]
Bools = npt.NDArray[np.bool_]


def sigmoid(x: npt.ArrayLike) -> Floats:
    """Logistic function of any shape, float64; by way of tanh, which does not overflow."""
    return 0.5 + 0.5 * np.tanh(0.5 * np.asarray(x, dtype=np.float64))


def prefix_survival(conditional: Floats) -> Floats:
    """Return [n, gamma] survivals, ``a_k = prod_{i <= k} c_i``, of conditional acceptances [n, gamma] (paper 3.2.1)."""
    return np.cumprod(conditional, axis=1)


def survived(accepted: Ints, gamma: int) -> Bools:
    """Return whether the draft and all before it were accepted: [n, gamma] of accepted counts [n]."""
    return np.asarray(accepted)[:, None] > np.arange(gamma)


def reached(verified: Ints, accepted: Ints, gamma: int) -> Bools:
    """Return [n, gamma] whether a draft was put to the test: one of [n] verified, and nothing before it rejected."""
    return np.minimum(verified, np.asarray(accepted) + 1)[:, None] > np.arange(gamma)
