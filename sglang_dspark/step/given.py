"""Rows of a verification whose tokens are given: none of them is drawn or accepted."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass

import torch
from dspark_kernels import FORCED, DraftBlock

from sglang_dspark.step.confidence import Confidence
from sglang_dspark.step.decision import StepDecision
from sglang_dspark.step.selection import TopK
from sglang_dspark.step.state import DecodeBatch, DraftOutput, TargetOutput, VerifyPlan

FIRST = 2 * FORCED
"""What given drafts rank by: before any other, so that their ranks change no other draft's place."""


@dataclass
class GivenRows(ABC):
    """Requests of a verification, alone or behind those of a decode step.

    Attributes:
        step: the requests.
        tokens: [requests, depth] int64 their drafts.
        ranks: [requests, depth] float32, :data:`FIRST`, or below 0 of fillers.
        num_drafts: those that are no fillers.
        context: mean tokens before each request.
    """

    step: DecodeBatch
    tokens: torch.Tensor
    ranks: torch.Tensor
    num_drafts: int
    context: float

    @abstractmethod
    def joined(self, step: DecodeBatch) -> DecodeBatch:
        """Return a step of the requests of ``step``, and of these behind them."""

    @abstractmethod
    def read(self, plan: VerifyPlan, target: TargetOutput, before: int) -> None:
        """Take what the target says of these rows, behind so many requests of ``plan``, before it is overwritten."""


def drafted(tokens: torch.Tensor, ranks: torch.Tensor, num_drafts: int) -> tuple[DraftOutput, StepDecision]:
    """Return drafts [requests, depth], and that the ``num_drafts`` of highest rank are verified."""
    requests, depth = tokens.shape
    draft = DraftOutput(DraftBlock(tokens), Confidence(None, ranks), [depth] * requests)
    return draft, StepDecision(depth, TopK(num_drafts))
