"""Declares the part that finds candidates for drafts, as the drafter knows it."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Protocol

import torch
from dspark_kernels import ChainRules

from sglang_dspark.engine.part import Part
from sglang_dspark.engine.sglang_types import Req, ScheduleBatch
from sglang_dspark.step.state import DecodeBatch


class RulesBuffers(Protocol):
    """The rules of captured searches for candidates, in buffers that stay where they are."""

    def stage(self, step: DecodeBatch) -> None:
        """Copy the rules of a step. No host sync."""

    def first(self, slots: int) -> ChainRules:
        """Return the staged rules of so many requests."""


class CandidateSource(Part, ABC):
    """A part that finds candidates, which compete with the drafter's tokens or are drafted in their place."""

    @abstractmethod
    def rules(self, batch: ScheduleBatch) -> ChainRules | None:
        """Return what SGLang's batch asks for in the step ahead; None if no request asks for anything."""

    @abstractmethod
    def names_drafts(self, req: Req) -> bool:
        """Return whether SGLang's request has asked for candidates in place of a drafter's tokens."""

    @abstractmethod
    def find(self, step: DecodeBatch, slot_tokens: torch.Tensor, number: int) -> torch.Tensor:
        """Return [bs, 2 + number] int64 chains of :class:`dspark_kernels.Candidates`.

        No host sync; CUDA graphs capture it.

        Args:
            slot_tokens: [slots] int64, the token whose K/V each slot holds; negative where none has one.
            number: of candidates for each request.
        """

    @abstractmethod
    def buffers(self, slots: int) -> RulesBuffers:
        """Return the rules of captured steps of up to so many requests."""
