"""Decode steps as CUDA graphs, captured and replayed: drafts and plan by request slots, verification to commit by rows.

All replays, and everything launched between them, run in one stream, in order. So the next step's draft may overwrite
the plan's buffers: whatever reads them was launched before it. What the host gets of a step is packed into memory of
its own (:mod:`sglang_dspark.step.packed`) before the next replay.
"""

import logging
import time
from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from typing import Any, TypeVar

import torch
from dspark_kernels import AcceptResult, DraftBlock, PlanNumbers, plan_staged, plan_uniform

from sglang_dspark.engine.graphs import Capture, Captured, Relay, capturing, logits_buffer, static_verify
from sglang_dspark.engine.part import CapturedPart, Part, StepPart
from sglang_dspark.engine.worker_base import Publish
from sglang_dspark.step.decision import StepDecision
from sglang_dspark.step.selection import build_plan
from sglang_dspark.step.state import DecodeBatch, DraftOutput, StepOutcome, TargetOutput, VerifyPlan
from sglang_dspark.worker.buffers import StepBuffers, Tiers, at_least
from sglang_dspark.worker.eager import EagerExecutor

logger = logging.getLogger(__name__)

Tier = tuple[int, bool]
"""Rows of a verification, and whether its step is plain."""


class CapturedSteps:
    """The captured stages of a server, and the buffers that they read and write.

    Args:
        eager: its stages are captured.
        request_slots: batch sizes to capture, ascending.
        depth: drafts per request that captured steps have room for.
        seed: of the engine's noise.
        relay: where fused graphs write the outcome for the next step; None if it is not read there.
        parts: what features do on the server.
        fuses: whether greedy steps are captured from the forward to the commit. Not if something looks at the logits of
            every step first.

    Attributes:
        tiers: sizes that were captured.
        buffers: what the graphs read and write.
        parts: what features add to captured verifications.
        drafts: by request slots, and whether some requests are sampled.
        plans: the part of the buffers that has the plan of a tier.
        forwards: of the target.
        fused: everything from the forward to the commit; in a non-speculative step from the plan on.
    """

    def __init__(
        self,
        eager: EagerExecutor,
        model_runner: Any,
        request_slots: list[int],
        depth: int,
        seed: int,
        *,
        relay: Relay | None = None,
        parts: Sequence[Part] = (),
        fuses: bool = True,
    ) -> None:
        self._free_before = torch.cuda.mem_get_info()[0]
        self.eager, self.relay, self._runner, self._depth = eager, relay, model_runner, depth
        self._fuses = fuses and not eager.agreement.needed  # ranks settle the outcome before the commit
        self.tiers = Tiers.of(request_slots, depth)
        self.buffers = StepBuffers(eager, model_runner.req_to_token_pool.req_to_token, self.tiers, depth, seed)
        most_requests, most_rows = self.tiers.requests[-1], len(self.buffers.rows.input_ids)
        self._logits = logits_buffer(model_runner, most_rows)
        captured = [part.captured(most_requests, most_rows) for part in parts]
        self.parts: list[CapturedPart] = [part for part in captured if part is not None]
        self.drafts: dict[tuple[int, bool], Captured[DraftBlock]] = {}
        self.plans: dict[Tier, VerifyPlan] = {}
        self.forwards: dict[Tier, Captured[TargetOutput]] = {}
        self.fused: dict[Tier, Captured[StepOutcome]] = {}

    def capture(self) -> None:
        """Capture every tier; takes seconds."""
        began = time.monotonic()
        with torch.no_grad(), capturing(self._runner) as capture:
            # Drafts first: the distribution of sampled drafts is read after the verification was replayed.
            if self._depth > 0:
                for slots in reversed(self.tiers.requests):
                    self._capture_draft(capture, slots, sampled=False)
                for slots in reversed(self.tiers.sampled):
                    self._capture_draft(capture, slots, sampled=True)
            for rows in reversed(self.tiers.tokens):
                self._capture_verify(capture, rows, plain=False)
            for slots in reversed(self.tiers.requests):
                self._capture_verify(capture, slots, plain=True)
        logger.info(
            "DSPARK: captured %d CUDA graphs for up to %d requests and %d rows in %.1f s, %.2f GB",
            len(self.drafts) + len(self.forwards) + len(self.fused),
            self.tiers.requests[-1],
            len(self._logits),
            time.monotonic() - began,
            (self._free_before - torch.cuda.mem_get_info()[0]) / 2**30,
        )

    def _capture_draft(self, capture: Capture, slots: int, *, sampled: bool) -> None:
        eager, forecast, buffers = self.eager, self.eager.schedule.forecast, self.buffers
        step, requests, prepared = buffers.step(slots, sampled=sampled), buffers.requests(slots), buffers.prepared

        def run() -> DraftBlock:
            block = eager.propose(step, self._depth, True, buffers.weights, prepared.block(slots))
            confidence = forecast.predict(block.confidence_logits, slots, self._depth, buffers.coefficients)
            buffers.keep(block, confidence)
            # For every tier of rows: which one verifies, the host has yet to choose.
            weights, drafts = buffers.request_weights[:slots], buffers.drafts[:slots]
            plan_staged(confidence.survival, weights, prepared.numbers, drafts, requests, buffers.rows)
            return block

        self.drafts[slots, sampled] = capture(run)

    def _capture_verify(self, capture: Capture, rows: int, *, plain: bool) -> None:
        slots = min(rows, self.tiers.requests[-1])  # each request has a row at least
        step = self.buffers.step(slots, sampled=False)
        plan = self.plans[rows, plain] = self.buffers.plan(slots, rows, width=1 if plain else self._depth + 1)
        forward = static_verify(self._runner, step, plan, self._logits[:rows], self.parts)
        self.forwards[rows, plain] = capture(forward)
        if self._fuses:
            self.fused[rows, plain] = self._capture_fused(capture, step, plan)

    def _capture_fused(self, capture: Capture, step: DecodeBatch, plan: VerifyPlan) -> Captured[StepOutcome]:
        eager, relay, requests, depth = self.eager, self.relay, self.buffers.requests(len(step)), plan.width - 1
        forward = static_verify(self._runner, step, plan, None, self.parts)
        draft = DraftOutput(DraftBlock(self.buffers.drafts[: len(step), :depth]), None, [depth] * len(step))

        def run() -> StepOutcome:
            if depth == 0:
                plan_uniform(0, draft.block.tokens, requests, len(plan.input_ids), plan)
            target = forward()
            accepted = eager.accept(step, draft, plan, target)
            eager.commit(plan, accepted, target)
            if relay is not None:
                relay.write(step.req_pool_indices, accepted)
            # No part of the forward is read after the commit, and what a graph returns keeps its memory.
            target.logits_output.next_token_logits = target.logits_output.last_hidden_states = None
            nothing = target._replace(captured=self._logits.new_empty(0), advance=None)
            return StepOutcome(draft, plan, nothing, accepted)

        return capture(run)

    def tier(self, step: DecodeBatch, decision: StepDecision) -> Tier | None:
        """Return the smallest tier that has room for a step.

        None if its shape was not captured, or if only the device knows the most drafts that it verifies.
        """
        requests, plain = len(step), decision.draft_len == 0
        slots, drafts = at_least(self.tiers.requests, requests), 0 if plain else decision.max_drafts(requests)
        if slots is None or drafts is None:
            return None
        rows = slots if plain else at_least(self.tiers.tokens, requests + drafts)
        return None if rows is None else (rows, plain)

    def draft_slots(self, step: DecodeBatch) -> int | None:
        """Return the request slots of the graph that drafts for ``step``; None if its drafts are launched."""
        if step.rows.any_seeded or (step.rules is not None and step.rules.second is not None):
            return None
        return at_least(self.tiers.sampled if step.rows.any_sampled else self.tiers.requests, len(step))


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

    def use_external_draft(self, draft: DraftOutput) -> DraftOutput:
        tokens = draft.block.tokens
        self._drafts[: len(tokens), : tokens.shape[1]] = tokens
        return replace(draft, block=replace(draft.block, tokens=self._drafts[: len(tokens)]))

    def plan(self, step: DecodeBatch, draft: DraftOutput, decision: StepDecision) -> VerifyPlan:
        """Return the rows of the tier, and lay them out if no graph has done so."""
        if draft.planned:
            return self._plan
        selected, tokens = decision.select(draft), draft.block.tokens
        self.agreement.broadcast_from_rank0(tokens, selected.synced)
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
        """Return the rows of the tier, only of the first requests."""
        plan = self._plan
        return replace(plan, verify_lens=plan.verify_lens[:requests], indptr=plan.indptr[: requests + 1])


class FusedExecutor(GraphExecutor):
    """Replays the draft with the plan, then everything from the forward to the commit; without drafts in one replay.

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
        """Run steps with these graphs from now on, if they fit into them."""
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
