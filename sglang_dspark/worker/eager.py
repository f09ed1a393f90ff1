"""Decode steps whose stages run eagerly.

The verification of some has given rows after their own, which they see as padding.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
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
from sglang_dspark.step.decision import ForcedRows, StepDecision, drafted
from sglang_dspark.step.selection import FixedLens, SelectedDrafts, build_plan
from sglang_dspark.step.state import DecodeBatch, DraftOutput, StepOutcome, TargetOutput, VerifyPlan
from sglang_dspark.worker.drafter import Drafter, NoDrafter


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
        """Propose a block for the requests that the decision names; nothing for a non-speculative step."""
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

    def use_external_draft(self, draft: DraftOutput) -> DraftOutput:
        """Return a draft that was made elsewhere, in memory that the stages after it read."""
        return draft

    def plan(self, step: DecodeBatch, draft: DraftOutput, decision: StepDecision) -> VerifyPlan:
        """Select the drafts that are verified, and lay their tokens out."""
        selected = decision.select(draft)
        self.agreement.broadcast_from_rank0(draft.block.tokens, selected.synced)
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
        self.agreement.broadcast_from_rank0(
            accepted.accept_lens, accepted.bonus_tokens, accepted.out_tokens, accepted.new_seq_lens
        )
        return accepted

    def commit(self, plan: VerifyPlan, accepted: AcceptResult, target: TargetOutput) -> None:
        """Write the draft K/V of the anchor and the accepted drafts of every request; have target layers advance."""
        self.drafter.commit(plan, accepted, target.captured)
        if target.advance is not None:
            target.advance(accepted.accept_lens + 1)


_NEVER = -1.0  # the rank of padding


class ExtraRowsExecutor(EagerExecutor):
    """Runs a step as ``own`` does, except its verification.

    Args:
        own: what would run the step alone; it drafts.
        select: returns what verifies.
        given: the rows after those of the step.
    """

    def __init__(
        self, own: EagerExecutor, select: Callable[[DecodeBatch, StepDecision], EagerExecutor], given: ForcedRows
    ) -> None:
        super().__init__(own.drafter, own.schedule, own.forward, own.agreement)
        self.draws, self._own, self._select, self._given = own.draws, own, select, given

    def stage(self, step: DecodeBatch, decision: StepDecision) -> None:
        self._own.stage(step, decision)

    def draft(self, step: DecodeBatch, decision: StepDecision) -> DraftOutput:
        return self._own.draft(step, decision)

    def plan(self, step: DecodeBatch, draft: DraftOutput, decision: StepDecision) -> VerifyPlan:
        """Lay out both, and return the plan of the step."""
        given, selected, tokens = self._given, decision.select(draft), draft.block.tokens
        self.agreement.broadcast_from_rank0(tokens, selected.synced)
        depth = given.tokens.shape[1]
        num_drafts, order = _order(selected, depth)
        tokens = torch.cat([F.pad(tokens, (0, depth - tokens.shape[1])), given.tokens])
        whole, decision = drafted(tokens, torch.cat([order, given.ranks]), num_drafts + given.num_drafts)
        self._step = given.joined(step)
        self._verifies = self._select(self._step, decision)
        self._verifies.stage(self._step, decision)
        self._plan = self._verifies.plan(self._step, self._verifies.use_external_draft(whole), decision)
        self.in_graphs = self._verifies.in_graphs
        return _as_padding(self._plan, len(step))

    def verify(self, step: DecodeBatch, plan: VerifyPlan) -> TargetOutput:
        target = self._verifies.verify(self._step, self._plan)
        self._given.read(self._plan, target, len(step))
        return target


def _as_padding(plan: VerifyPlan, requests: int) -> VerifyPlan:
    """Return the plan of its first requests, to which all rows after theirs are padding."""
    beyond = torch.arange(len(plan.requests), device=plan.requests.device) >= plan.indptr[requests]
    return replace(
        plan,
        verify_lens=plan.verify_lens[:requests],
        indptr=plan.indptr[: requests + 1],
        requests=plan.requests.masked_fill(beyond, 0),
        columns=plan.columns.masked_fill(beyond, plan.width),
    )


def _order(selected: SelectedDrafts, depth: int) -> tuple[int, torch.Tensor]:
    """Return how many drafts are verified, and [requests, depth] what they rank by.

    The host waits where only the device knows how many these are.
    """
    if isinstance(selected, FixedLens):
        length, requests = selected.verify_len, selected.requests
        order = torch.ones((requests, length), device=selected.device)
        return length * requests, F.pad(order, (0, depth - length), value=_NEVER)
    num_drafts = selected.budget if selected.row_count_known else int(selected.verify_lens.sum())
    return num_drafts, F.pad(selected.order, (0, depth - selected.order.shape[1]), value=_NEVER)
