"""How sure the drafter is of its drafts."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Confidence:
    """Confidences of a drafted step.

    Attributes:
        packed: [2, bs, depth] float32, the logits and the survivals: one tensor, so that one copy brings both to the
            host.
    """

    packed: torch.Tensor

    @classmethod
    def of(cls, logits: torch.Tensor | None, survival: torch.Tensor) -> Confidence:
        """Pack [bs, depth] of each; the logits of a drafter without a confidence head are NaN."""
        return cls(torch.stack([torch.full_like(survival, torch.nan) if logits is None else logits, survival]))

    @property
    def logits(self) -> torch.Tensor:
        """[bs, depth] of the confidence head, uncalibrated; NaN without one."""
        return self.packed[0]

    @property
    def survival(self) -> torch.Tensor:
        """[bs, depth] calibrated probability that a draft and all drafts before it are accepted."""
        return self.packed[1]

    def copied(self, copy: Callable[[torch.Tensor], torch.Tensor]) -> Confidence:
        """These confidences where ``copy`` brings the tensor, such as to the host."""
        return Confidence(copy(self.packed))
