"""A decode step whose stages run eagerly."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from dspark_kernels import (
    AcceptResult,
    DraftBlock,
    SimulatedDraws,
    accept,
    simulated_accept,
    simulated_confidence,
)

from sglang_dspark.engine.agreement import Agreement
from sglang_dspark.engine.part import StepPart
from sglang_dspark.engine.worker_base import Publish
from sglang_dspark.scheduling.schedule import Schedule
from sglang_dspark.step.decision import StepDecision
from sglang_dspark.step.selected import build_plan
from sglang_dspark.step.state import DecodeBatch, DraftOutput, StepOutcome, TargetOutput, VerifyPlan
from sglang_dspark.worker.drafter import Drafter
from sglang_dspark.worker.no_drafter import NoDrafter


class EagerExecutor:
    """Runs every step; knows no engine but the forward that it is given.

    Args:
        drafter: proposes blocks and keeps their K/V.
        schedule: says how likely drafts are to survive.
        forward: of the target over the rows of a plan.
        agreement: between the ranks of the server.

    Attributes:
        draws: by which drafts are kept in place of what the target says; None asks it.
        in_graphs: whether stages are replayed from CUDA graphs.
    """

    draws: SimulatedDraws | None
    in_graphs = False

    def __init__(
        self,
        drafter: Drafter | NoDrafter,
        schedule: Schedule,
        forward: Callable[[DecodeBatch, VerifyPlan], TargetOutput],
        agreement: Agreement,
    ) -> None:
        self.drafter, self.schedule, self.agreement = drafter, schedule, agreement
        self.forward, self.draws = forward, None

    def run(
        self,
        step: DecodeBatch,
        decision: StepDecision,
        parts: Sequence[StepPart] = (),
        publish: Publish = lambda new_seq_lens: None,
    ) -> StepOutcome:
        """Draft, plan, verify, accept, publish and commit.

        Args:
            parts: what features do with the step's logits.
            publish: hands the new lengths [bs] to the engine, as soon as the device knows them.
        """
        if decision.draft_len and self.drafter.held:
            self.drafter.settle()
        self.stage(step, decision)
        outcome = self.finish(step, decision, self.draft(step, decision), parts, publish)
        if decision.draft_len == 0:
            self.drafter.committed(outcome.plan)
        return outcome

    def finish(
        self,
        step: DecodeBatch,
        decision: StepDecision,
        draft: DraftOutput,
        parts: Sequence[StepPart] = (),
        publish: Publish = lambda new_seq_lens: None,
    ) -> StepOutcome:
        """Run what follows the draft."""
        plan = self.plan(step, draft, decision)
        for part in parts:
            part.before_verify(plan)
        target = self.verify(step, plan)
        for part in parts:
            part.after_verify(plan, target.logits_output.next_token_logits)
        accepted = self.accept(step, draft, plan, target)
        publish(accepted.new_seq_lens)
        self.commit(plan, accepted, target)
        return StepOutcome(draft, plan, target, accepted)

    def stage(self, step: DecodeBatch, decision: StepDecision) -> None:
        """Copy the step to where graphs read it; nothing if stages are launched."""

    def draft(self, step: DecodeBatch, decision: StepDecision) -> DraftOutput:
        """Propose a block for the requests that the decision names; nothing for a plain step."""
        bs, depth, forecast = len(step), decision.draft_len, self.schedule.forecast
        if depth == 0:
            return DraftOutput.nothing(bs, step.anchors.device)
        if decision.draft_requests is None:
            block = self.propose(step, depth, decision.with_confidence, forecast.weights)
        else:
            part, index = step.drafting(decision.draft_requests)
            block = self.propose(part, depth, decision.with_confidence, forecast.weights).spread(index, bs)
        confidence = None
        if decision.with_confidence:
            confidence = forecast.predict(block.confidence_logits, bs, depth)
        return DraftOutput(block, confidence, decision.draft_lens(bs))

    def propose(self, step: DecodeBatch, depth: int, *given: Any) -> DraftBlock:
        """Return the drafter's block; where acceptance is simulated, it is as sure of it as the simulation is."""
        block = self.drafter.propose(step, depth, *given)
        if self.draws is None or block.confidence_logits is None:
            return block
        logits = simulated_confidence(self.draws, step.req_pool_indices, step.prefix_lens, depth)
        return replace(block, confidence_logits=logits)

    def take(self, draft: DraftOutput) -> DraftOutput:
        """Return a draft that was made elsewhere, in memory that the stages behind it read."""
        return draft

    def plan(self, step: DecodeBatch, draft: DraftOutput, decision: StepDecision) -> VerifyPlan:
        """Select the drafts that are verified, and lay their tokens out."""
        selected = decision.select(draft)
        self.agreement.adopt(draft.block.tokens, selected.synced)
        return build_plan(step.requests, draft.block.tokens, selected)

    def verify(self, step: DecodeBatch, plan: VerifyPlan) -> TargetOutput:
        """Run the target over the plan's rows."""
        return self.forward(step, plan)

    def accept(self, step: DecodeBatch, draft: DraftOutput, plan: VerifyPlan, target: TargetOutput) -> AcceptResult:
        """Keep the drafts that the target agrees with and draw the token after them."""
        logits = target.logits_output.next_token_logits
        accepted = accept(draft.block, plan, logits, step.prefix_lens, step.rows, step.keys)
        if self.draws is not None:
            given = step.req_pool_indices, step.prefix_lens, draft.block.tokens, accepted.bonus_tokens
            accepted = simulated_accept(self.draws, *given, plan.verify_lens)
        self.agreement.adopt(accepted.accept_lens, accepted.bonus_tokens, accepted.out_tokens, accepted.new_seq_lens)
        return accepted

    def commit(self, plan: VerifyPlan, accepted: AcceptResult, target: TargetOutput) -> None:
        """Write the draft K/V of the anchor and the accepted drafts of every request; have target layers advance."""
        self.drafter.commit(plan, accepted, target.captured)
        if target.advance is not None:
            target.advance(accepted.accept_lens + 1)
