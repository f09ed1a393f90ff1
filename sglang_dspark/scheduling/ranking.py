"""The drafts that a step may verify: in which order they are worth it, and how many each request allows."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from dspark_kernels import FORCED

from sglang_dspark.scheduling.selection import above_threshold
from sglang_dspark.step.choice import Choice
from sglang_dspark.step.limits import Limits
from sglang_dspark.step.state import Drafted
from sglang_dspark.step.transfers import host_floats, host_index

_EXCLUDED = -1.0
"""Survival of a draft that must not be verified."""


@dataclass(frozen=True)
class Bounds:
    """Limits of a step's requests as they turn out for its drafts.

    Attributes:
        most: [bs] int64 leading drafts of a block that may be verified; of copied drafts, all are.
        copied: [bs] bool, whether the drafts are a preset's and not the drafter's.
    """

    most: torch.Tensor
    copied: torch.Tensor

    @classmethod
    def of(cls, limits: Limits, drafted: Drafted) -> Bounds:
        """Apply ``limits``, which :meth:`Choice.within` has cut to what the step drafts, to the drafts themselves."""
        device = drafted.device
        most, num_copied = host_index((limits.most, limits.copied), device)
        copied = num_copied > 0
        if limits.thresholds is not None:
            sure = above_threshold(drafted.raw_confidence, host_floats(limits.thresholds, device)[:, None])
            most = torch.where(copied, most, torch.minimum(most, sure))
        return cls(most, copied)

    def cut(self, lens: torch.Tensor) -> torch.Tensor:
        """Lengths [bs] of a rule that knows nothing of bounds, as they may be."""
        return torch.where(self.copied, self.most, torch.minimum(lens, self.most))

    def apply(self, survival: torch.Tensor) -> torch.Tensor:
        """[bs, width] what drafts are ranked by: copied ones come first, those past the bounds never."""
        slots = torch.arange(survival.shape[1], device=survival.device)
        return survival.masked_fill(self.copied[:, None], FORCED).masked_fill(slots >= self.most[:, None], _EXCLUDED)

    def drafted(self, survival: torch.Tensor) -> torch.Tensor:
        """[bs, depth] survivals of the drafter's drafts within the bounds; others are never worth anything."""
        return self.apply(survival).masked_fill(self.copied[:, None], _EXCLUDED)


def ranked(choice: Choice, drafted: Drafted) -> torch.Tensor:
    """[bs, width of the block] what drafts are ranked by: their survival, but for what the choice singles out."""
    bs, width, device = len(drafted), drafted.width, drafted.device
    # A policy without confidences ranks drafts only to keep them within limits, which leave no choice.
    survival = torch.ones((bs, width), device=device) if drafted.confidence is None else drafted.survival
    if survival.shape[1] < width:
        survival = torch.nn.functional.pad(survival, (0, width - survival.shape[1]), value=_EXCLUDED)
    if choice.drafted is not None:
        left_out = host_index([r for r in range(bs) if r not in choice.drafted], device)
        survival = survival.index_fill(0, left_out, _EXCLUDED)
    if choice.forced is not None:
        survival = survival.clone()
        survival[choice.forced] = FORCED
    return survival if choice.limits is None else Bounds.of(choice.limits, drafted).apply(survival)
