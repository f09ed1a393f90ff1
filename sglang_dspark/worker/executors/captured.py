"""Decode steps as CUDA graphs: drafts and plan by request slots, verification to commit by rows.

All replays, and everything launched between them, run in one stream, in order. So the next step's draft may overwrite
the plan's buffers: whatever reads them was launched before it. What the host gets of a step is packed into memory of
its own (:mod:`sglang_dspark.step.packed`) before the next replay.
"""

import logging
import time
from collections.abc import Sequence
from typing import Any

import torch
from dspark_kernels import DraftBlock, plan_staged, plan_uniform

from sglang_dspark.engine.graphs import Capture, Captured, Relay, capturing, logits_buffer, static_verify
from sglang_dspark.engine.part import CapturedPart, Part
from sglang_dspark.step.decision import StepDecision
from sglang_dspark.step.state import DecodeBatch, DraftOutput, StepOutcome, TargetOutput, VerifyPlan
from sglang_dspark.worker.executors.buffers import StepBuffers
from sglang_dspark.worker.executors.eager import EagerExecutor
from sglang_dspark.worker.tiers import Tiers, at_least

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
        fused: everything from the forward to the commit; in a plain step from the plan on.
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
            # No part of the forward is read behind the commit, and what a graph returns keeps its memory.
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
