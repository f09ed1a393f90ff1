"""Decode steps whose verification has given rows behind their own, which they see as padding."""

from collections.abc import Callable
from dataclasses import replace

import torch
import torch.nn.functional as F

from sglang_dspark.step.decision import StepDecision
from sglang_dspark.step.given import GivenRows, drafted
from sglang_dspark.step.selected import FixedLens, SelectedDrafts
from sglang_dspark.step.state import DecodeBatch, DraftOutput, TargetOutput, VerifyPlan
from sglang_dspark.worker.executors.eager import EagerExecutor

_NEVER = -1.0  # what fillers rank by


class BesideExecutor(EagerExecutor):
    """Runs a step as ``own`` does, but for its verification.

    Args:
        own: what would run the step alone; it drafts.
        select: returns what verifies.
        given: the rows behind those of the step.
    """

    def __init__(
        self, own: EagerExecutor, select: Callable[[DecodeBatch, StepDecision], EagerExecutor], given: GivenRows
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
        self.agreement.adopt(tokens, selected.synced)
        depth = given.tokens.shape[1]
        num_drafts, order = _order(selected, depth)
        tokens = torch.cat([F.pad(tokens, (0, depth - tokens.shape[1])), given.tokens])
        whole, decision = drafted(tokens, torch.cat([order, given.ranks]), num_drafts + given.num_drafts)
        self._step = given.joined(step)
        self._verifies = self._select(self._step, decision)
        self._verifies.stage(self._step, decision)
        self._plan = self._verifies.plan(self._step, self._verifies.take(whole), decision)
        self.in_graphs = self._verifies.in_graphs
        return _as_padding(self._plan, len(step))

    def verify(self, step: DecodeBatch, plan: VerifyPlan) -> TargetOutput:
        target = self._verifies.verify(self._step, self._plan)
        self._given.read(self._plan, target, len(step))
        return target


def _as_padding(plan: VerifyPlan, requests: int) -> VerifyPlan:
    """Return the plan of its first requests, to which all rows behind theirs are padding."""
    behind = torch.arange(len(plan.requests), device=plan.requests.device) >= plan.indptr[requests]
    return replace(
        plan,
        verify_lens=plan.verify_lens[:requests],
        indptr=plan.indptr[: requests + 1],
        requests=plan.requests.masked_fill(behind, 0),
        columns=plan.columns.masked_fill(behind, plan.width),
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
