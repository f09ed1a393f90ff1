"""Decode steps that CUDA graphs replay, and the choice of what runs a step."""

from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from typing import TypeVar

from dspark_kernels import AcceptResult, DraftBlock, PlanNumbers

from sglang_dspark.engine.graphs import Captured
from sglang_dspark.engine.part import StepPart
from sglang_dspark.engine.worker_base import Publish
from sglang_dspark.step.decision import StepDecision
from sglang_dspark.step.selected import build_plan
from sglang_dspark.step.state import DecodeBatch, DraftOutput, StepOutcome, TargetOutput, VerifyPlan
from sglang_dspark.worker.executors.captured import CapturedSteps, Tier
from sglang_dspark.worker.executors.eager import EagerExecutor

T = TypeVar("T")


class GraphExecutor(EagerExecutor):
    """Replays draft and forward of one tier, and launches the rest.

    It runs steps whose logits are adjusted or read, whose tokens are drawn, or on which ranks have to agree.
    """

    in_graphs = True

    def __init__(self, captured: CapturedSteps, tier: Tier) -> None:
        eager = captured.eager
        super().__init__(eager.drafter, eager.schedule, eager.forward, eager.agreement)
        self.draws = eager.draws
        self._captured, self._buffers = captured, captured.buffers
        self._plan, self._graph = captured.plans[tier], captured.forwards[tier]
        slots = len(self._plan.verify_lens)
        self._requests, self._drafts = self._buffers.requests(slots), self._buffers.drafts[:slots]
        self._numbers: PlanNumbers | None = None  # of the plan that the draft's graph makes for the staged step
        # Views for every number of requests, made once.
        self._block_of, self._plan_of = cache(self._first_blocks), cache(self._first_requests)

    def stage(self, step: DecodeBatch, decision: StepDecision) -> None:
        # None has planning run eagerly, as it does if ranks have to agree.
        self._numbers = None if self.agreement.needed else decision.plan_numbers(len(step))
        self._buffers.stage(step, self._numbers)
        self._buffers.stage_weights(decision.selection.weights)

    def draft(self, step: DecodeBatch, decision: StepDecision) -> DraftOutput:
        """Propose blocks for all requests: on a GPU a few less take no less time."""
        requests = len(step)
        if decision.draft_len == 0:
            return DraftOutput.nothing(requests, step.anchors.device)
        slots = self._captured.draft_slots(step)
        if slots is None:
            block, planned = self._launch_draft(step, decision), False
        else:
            block, planned = self._replay_draft(step, slots), self._numbers is not None
        confidence = self._buffers.confidence(requests) if decision.with_confidence else None
        return DraftOutput(block, confidence, decision.draft_lens(requests), planned=planned)

    def take(self, draft: DraftOutput) -> DraftOutput:
        tokens = draft.block.tokens
        self._drafts[: len(tokens), : tokens.shape[1]] = tokens
        return replace(draft, block=replace(draft.block, tokens=self._drafts[: len(tokens)]))

    def plan(self, step: DecodeBatch, draft: DraftOutput, decision: StepDecision) -> VerifyPlan:
        """Return the rows of the tier, and lay them out if no graph has done so."""
        if draft.planned:
            return self._plan
        selected, tokens = decision.select(draft), draft.block.tokens
        self.agreement.adopt(tokens, selected.synced)
        return build_plan(self._requests, self._drafts, selected, self._plan)

    def verify(self, step: DecodeBatch, plan: VerifyPlan) -> TargetOutput:
        return self._replay(step, self._graph)

    def accept(self, step: DecodeBatch, draft: DraftOutput, plan: VerifyPlan, target: TargetOutput) -> AcceptResult:
        return super().accept(step, draft, self._plan_of(len(step)), target)

    def _replay(self, step: DecodeBatch, graph: Captured[T]) -> T:
        """Replay a forward of the target, with what features write for it."""
        for part in self._captured.parts:
            part.stage(step.batch)
        return graph.replay()

    def _replay_draft(self, step: DecodeBatch, slots: int) -> DraftBlock:
        sampled = step.rows.any_sampled
        if sampled:
            self._buffers.stage_noise(step, slots)
        self._buffers.stage_learned()
        self._captured.drafts[slots, sampled].replay()
        return self._block_of(slots, sampled, len(step))

    def _launch_draft(self, step: DecodeBatch, decision: StepDecision) -> DraftBlock:
        draft = super().draft(step, replace(decision, draft_len=self._drafts.shape[1], draft_requests=None))
        self._buffers.keep(draft.block, draft.confidence)
        return replace(draft.block, tokens=self._drafts[: len(step)])

    def _first_blocks(self, slots: int, sampled: bool, requests: int) -> DraftBlock:
        """Return the first of the captured blocks, whose tokens are those that are verified."""
        return replace(self._captured.drafts[slots, sampled].output.first(requests), tokens=self._drafts[:requests])

    def _first_requests(self, requests: int) -> VerifyPlan:
        """Return the rows of the tier, of the first requests alone."""
        plan = self._plan
        return replace(plan, verify_lens=plan.verify_lens[:requests], indptr=plan.indptr[: requests + 1])


class FusedExecutor(GraphExecutor):
    """Replays the draft with the plan, then everything from the forward to the commit; a plain step is one replay.

    It runs greedy steps whose logits nothing but acceptance reads.
    """

    def __init__(self, captured: CapturedSteps, tier: Tier) -> None:
        super().__init__(captured, tier)
        self._fused, self._relay = captured.fused[tier], captured.relay
        self._outcome_of = cache(self._first_outcomes)

    def finish(
        self,
        step: DecodeBatch,
        decision: StepDecision,
        draft: DraftOutput,
        parts: Sequence[StepPart] = (),
        publish: Publish = lambda new_seq_lens: None,
    ) -> StepOutcome:
        if decision.draft_len > 0:
            self.plan(step, draft, decision)
        self._replay(step, self._fused)
        outcome = self._outcome_of(len(step))
        if self._relay is None:
            outcome = replace(outcome, accepted=_kept(outcome.accepted))
        else:
            self._relay.was_written(outcome.accepted)
        publish(outcome.accepted.new_seq_lens)
        return replace(outcome, draft=draft)

    def _first_outcomes(self, requests: int) -> StepOutcome:
        """Return the captured outcome of the first requests; the next replay overwrites it."""
        outcome = self._fused.output
        return replace(outcome, accepted=AcceptResult(*(part[:requests] for part in vars(outcome.accepted).values())))


def _kept(accepted: AcceptResult) -> AcceptResult:
    """Return the outcome, with what SGLang hands to the next step in memory that replays leave alone."""
    return replace(accepted, bonus_tokens=accepted.bonus_tokens.clone(), new_seq_lens=accepted.new_seq_lens.clone())


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
