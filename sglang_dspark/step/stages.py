"""What takes a decode step: its stages in the order in which a worker calls them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol, TypeVar

import torch
from dspark_kernels import AcceptResult

from sglang_dspark.step.decision import StepDecision
from sglang_dspark.step.state import DecodeBatch, Drafted, TargetOutput, VerifyPlan

T = TypeVar("T")

Verify = Callable[[Any, DecodeBatch, VerifyPlan], TargetOutput]
"""Runs the target over the rows of a plan: the engine's batch, the step, the plan."""


class Stages(Protocol):
    """The stages of one decode step.

    Attributes:
        in_graphs: whether they are replayed from CUDA graphs, or run eagerly.
    """

    in_graphs: bool

    def draft(self, step: DecodeBatch, decision: StepDecision) -> Drafted:
        """Propose a block for the requests that the decision names; nothing for a plain step."""

    def plan(self, step: DecodeBatch, drafted: Drafted, decision: StepDecision) -> VerifyPlan:
        """Choose which drafts are verified, and lay their tokens out."""

    def verify(self, batch: Any, step: DecodeBatch, plan: VerifyPlan) -> TargetOutput:
        """Run the target over the plan's rows; ``batch`` is the engine's."""

    def accept(self, step: DecodeBatch, drafted: Drafted, plan: VerifyPlan, output: TargetOutput) -> AcceptResult:
        """Keep the drafts that the target agrees with and draw the token after them."""

    def commit(self, plan: VerifyPlan, accepted: AcceptResult, output: TargetOutput) -> None:
        """Write the draft K/V of the anchor and the accepted drafts of every request."""


class Agreement(Protocol):
    """How the ranks of a server stay together: rank 0 decides, the others follow."""

    @property
    def needed(self) -> bool:
        """Return whether there are other ranks."""

    @property
    def leads(self) -> bool:
        """Return whether this is the rank that the others follow."""

    def share(self, value: T) -> T:
        """Rank 0's ``value`` on every rank, by way of the host."""

    def adopt(self, *tensors: torch.Tensor | None) -> None:
        """Overwrite ``tensors`` in place with rank 0's; None is passed over."""


class OneRank:
    """The agreement of a server with one rank."""

    needed = False
    leads = True

    def share(self, value: T) -> T:
        """Return ``value``: there is no other rank."""
        return value

    def adopt(self, *tensors: torch.Tensor | None) -> None:
        """Do nothing: there is no other rank."""
