"""The drafter's confidence in its drafts."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Confidence:
    """Confidences of a drafted step.

    Attributes:
        logits: [bs, depth] float32 of the confidence head, uncalibrated; None without one.
        survival: [bs, depth] float32, calibrated probability that a draft and all drafts before it are accepted.
    """

    logits: torch.Tensor | None
    survival: torch.Tensor

    def first(self, bs: int) -> Confidence:
        """Return those of the first ``bs`` requests."""
        return Confidence(None if self.logits is None else self.logits[:bs], self.survival[:bs])
