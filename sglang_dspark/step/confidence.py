"""How sure the drafter is of its drafts."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Confidence:
    """Confidences of a drafted step.

    Attributes:
        logits: [bs, depth] float32 of the confidence head, uncalibrated; None or NaN without one.
        survival: [bs, depth] float32, calibrated probability that a draft and all drafts before it are accepted.
    """

    logits: torch.Tensor | None
    survival: torch.Tensor
