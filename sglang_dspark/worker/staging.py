"""Selects what runs a step: CUDA graphs, or the same stages run eagerly."""

from __future__ import annotations

from dataclasses import dataclass

from sglang_dspark.step.decision import StepDecision
from sglang_dspark.step.stages import Stages
from sglang_dspark.step.state import DecodeBatch
from sglang_dspark.worker.graph_stages import StepGraphs
from sglang_dspark.worker.stages import EagerStages


@dataclass
class Staging:
    """The stages of a server.

    Attributes:
        eager: takes every step.
        graphs: captured; None where steps run eagerly.
    """

    eager: EagerStages
    graphs: StepGraphs | None = None

    def of(self, step: DecodeBatch, decision: StepDecision) -> Stages:
        """The stages of this step: its CUDA graphs where it fits into them."""
        staged = None if self.graphs is None else self.graphs.stage(step, decision)
        return staged or self.eager
