"""Select the executor of a step."""

from sglang_dspark.step.decision import StepDecision
from sglang_dspark.step.state import DecodeBatch
from sglang_dspark.worker.executors.captured import CapturedSteps, Tier
from sglang_dspark.worker.executors.eager import EagerExecutor
from sglang_dspark.worker.executors.graphs import FusedExecutor, GraphExecutor


class ExecutorSelector:
    """The executors of a server.

    Attributes:
        eager: runs every step.
        captured: None if all steps run eagerly.
    """

    def __init__(self, eager: EagerExecutor) -> None:
        self.eager = eager
        self.drop_graphs()

    def drop_graphs(self) -> None:
        """Run all steps eagerly from now on."""
        self.captured: CapturedSteps | None = None
        self._graphs: dict[Tier, GraphExecutor] = {}
        self._fused: dict[Tier, GraphExecutor] = {}

    def add_graphs(self, captured: CapturedSteps) -> None:
        """Run steps by these graphs from now on, if they fit into them."""
        self.captured = captured
        self._graphs = {tier: GraphExecutor(captured, tier) for tier in captured.plans}
        self._fused = {tier: FusedExecutor(captured, tier) for tier in captured.fused}

    def select(self, step: DecodeBatch, decision: StepDecision) -> EagerExecutor:
        """Return the graphs of the smallest tier that has room for a step, or else the eager executor."""
        tier = None if self.captured is None else self.captured.tier(step, decision)
        if tier is None:
            return self.eager
        if tier in self._fused and step.rows.all_greedy and not step.keeps_logits:
            return self._fused[tier]
        return self._graphs[tier]
