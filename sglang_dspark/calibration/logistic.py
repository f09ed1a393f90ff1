"""Ridge-regularised logistic regression of outcomes on one logit, for all positions at once."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from sglang_dspark.calibration.survival import Floats

SCALE_BOUNDS = (0.05, 20.0)
"""Positive, so that a position keeps its order of confidence. Temperatures from 20 to 1/20: beyond, a head is as
good as constant or a step."""
SHIFT_BOUNDS = (-10.0, 10.0)
"""sigmoid(10) is 5e-5 away from 1, less than a window of 1000 outcomes can show."""
SCALE_PRECISION = 1.0
SHIFT_PRECISION = 0.25
"""Ridge: a priori, scale is within 1 of its start and shift within 2 of 0 (standard deviations). An outcome at
probability 0.8 adds 0.16 to the shift's precision, so a dozen outweigh it; a window without contrast stays finite."""


@dataclass(frozen=True)
class LogisticMap:
    """``c_k = sigmoid(scale_k * z_k + shift_k)``; both arrays [gamma] float64."""

    scale: Floats
    shift: Floats

    def __call__(self, logits: Floats) -> Floats:
        """Logits [..., gamma] -> logits of the conditional acceptance, the same shape."""
        return self.scale * logits + self.shift

    def refined(
        self, start_scale: Floats, logits: Floats, outcomes: Floats, filled: npt.NDArray[Any], steps: int
    ) -> LogisticMap:
        """The map after some more steps towards the best fit to a window.

        A step is Newton's with the curvature ``p (1 - p)`` of an outcome replaced by its upper bound ``tanh(|x| / 2) /
        (2 |x|)`` at ``x = scale z + shift`` (Jaakkola and Jordan 2000). The penalised likelihood is concave and grows
        with every such step, from any start and on separable data, where plain Newton steps overshoot.

        Args:
            start_scale: [gamma] what the ridge pulls the scale to; the shift is pulled to 0.
            logits: [gamma, w]
            outcomes: [gamma, w] 0 or 1
            filled: [gamma] entries of a row that count, from its start.
        """
        weight = (np.arange(logits.shape[1]) < filled[:, None]).astype(np.float64)
        residual = weight * (outcomes - 0.5)
        pull_scale = (residual * logits).sum(axis=1) + SCALE_PRECISION * start_scale
        pull_shift = residual.sum(axis=1)
        scale, shift = self.scale, self.shift
        for _ in range(steps):
            # tanh(x / 2) / (2 x) tends to 1/4 at 0, where the quotient cannot be formed.
            x = np.maximum(np.abs(scale[:, None] * logits + shift[:, None]), 1e-6)
            curvature = weight * np.tanh(0.5 * x) / (2.0 * x)
            weighted = curvature * logits
            scale_scale = (weighted * logits).sum(axis=1) + SCALE_PRECISION
            scale_shift = weighted.sum(axis=1)
            shift_shift = curvature.sum(axis=1) + SHIFT_PRECISION
            determinant = scale_scale * shift_shift - scale_shift**2
            scale = np.clip((shift_shift * pull_scale - scale_shift * pull_shift) / determinant, *SCALE_BOUNDS)
            # The best shift for that scale: where the scale is at its bound it is another one than Newton's.
            shift = np.clip((pull_shift - scale_shift * scale) / shift_shift, *SHIFT_BOUNDS)
        return LogisticMap(scale, shift)
