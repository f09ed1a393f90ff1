"""The stages of a decode step, run eagerly."""

from __future__ import annotations

from typing import Any

import torch
from dspark_kernels import AcceptResult, DraftBlock, accept, simulated_accept

from sglang_dspark.scheduling.schedule import Schedule
from sglang_dspark.step.decision import StepDecision
from sglang_dspark.step.selected import build_plan
from sglang_dspark.step.stages import Agreement, Verify
from sglang_dspark.step.state import DecodeBatch, Drafted, TargetOutput, VerifyPlan
from sglang_dspark.worker.drafter import Drafter, NoDrafter


class EagerStages:
    """Takes every step; knows no engine but the forward that it is given.

    Args:
        drafter: proposes blocks and keeps their K/V.
        schedule: says how likely drafts are to survive, and which are verified.
        verify: the target's forward.
        agreement: between the ranks of the server.
        profile: [gamma] float64 probabilities by which drafts are kept in place of what the target says; None asks it.
    """

    in_graphs = False

    def __init__(
        self,
        drafter: Drafter | NoDrafter,
        schedule: Schedule,
        verify: Verify,
        agreement: Agreement,
        profile: torch.Tensor | None = None,
    ) -> None:
        self.drafter, self.schedule, self.agreement, self.profile = drafter, schedule, agreement, profile
        self._verify = verify

    def draft(self, step: DecodeBatch, decision: StepDecision) -> Drafted:
        """Propose a block for the requests that the decision names; nothing for a plain step."""
        bs, depth = len(step), decision.draft_len
        if depth == 0:
            return Drafted(DraftBlock.empty(bs, step.anchors.device), None, [0] * bs)
        if decision.draft_requests is None:
            block = self.drafter.propose(step, depth, decision.with_confidence)
        else:
            part, places = step.drafting(decision.draft_requests)
            block = self.drafter.propose(part, depth, decision.with_confidence).spread(places, bs)
        confidence = None
        if decision.with_confidence:
            confidence = self.schedule.forecast.predict(block.confidence_logits, bs, depth)
        return Drafted(block, confidence, decision.draft_lens(bs))

    def plan(self, step: DecodeBatch, drafted: Drafted, decision: StepDecision) -> VerifyPlan:
        """Choose which drafts are verified, and lay their tokens out."""
        selected = decision.select(drafted)
        self.agreement.adopt(drafted.block.tokens, selected.synced)
        return build_plan(step.requests, drafted.block.tokens, selected)

    def verify(self, batch: Any, step: DecodeBatch, plan: VerifyPlan) -> TargetOutput:
        """Run the target over the plan's rows."""
        return self._verify(batch, step, plan)

    def accept(self, step: DecodeBatch, drafted: Drafted, plan: VerifyPlan, output: TargetOutput) -> AcceptResult:
        """Keep the drafts that the target agrees with and draw the token after them."""
        logits = output.logits_output.next_token_logits
        accepted = accept(drafted.block, plan, logits, step.prefix_lens, step.rows, step.keys)
        if self.profile is not None:
            accepted = simulated_accept(accepted, drafted.block.tokens, plan.verify_lens, self.profile)
        self.agreement.adopt(accepted.accept_lens, accepted.bonus_tokens, accepted.out_tokens, accepted.new_seq_lens)
        return accepted

    def commit(self, plan: VerifyPlan, accepted: AcceptResult, output: TargetOutput) -> None:
        """Write the draft K/V of the anchor and the accepted drafts of every request."""
        self.drafter.commit(plan, accepted, output.captured)
