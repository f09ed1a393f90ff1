"""The stages of a decode step as CUDA graphs: drafts and plan by request slots, verification to commit by rows.

A step is staged into buffers that stay where they are, in the smallest tier that has room for it. What is not the
step's is padding: request slots without context whose results nobody reads, rows of no request.

A step of greedy requests is two replays, and a plain one is a single replay. Where something has to happen in between
(logits are adjusted, tokens are drawn, ranks agree), the same stages are launched between a draft graph and a graph of
the forward alone.

All replays, and everything launched between them, run in one stream, in order. So the next step's draft may overwrite
the plan's buffers: whatever reads them was launched before it. What the host gets of a step is packed into memory of
its own (:mod:`sglang_dspark.step.packed`) before the next replay.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Hashable
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple, TypeVar, cast

import torch
from dspark_kernels import (
    Accepted,
    DraftBlock,
    PlanNumbers,
    PreparedStep,
    RoundKeys,
    SamplingRows,
    StepRequests,
    VerifyRows,
    plan_staged,
    plan_uniform,
    prepare,
)

from sglang_dspark.engine.forward.adapters import CapturedAdapters
from sglang_dspark.engine.forward.graphs import Capture, Captured, capturing, logits_buffer, static_verify
from sglang_dspark.engine.scheduler.future_map import Relay
from sglang_dspark.step.confidence import Confidence
from sglang_dspark.step.decision import StepDecision
from sglang_dspark.step.selected import build_plan
from sglang_dspark.step.state import DecodeBatch, Drafted, TargetOutput, VerifyPlan
from sglang_dspark.worker.stages import EagerStages
from sglang_dspark.worker.tiers import Tiers

T = TypeVar("T", PreparedStep, VerifyRows)
V = TypeVar("V")

logger = logging.getLogger(__name__)


class Judged(NamedTuple):
    """What a verification gives whose drafts were judged and committed in the same graph.

    Attributes:
        output: of the target, without logits and hidden states: they are not read, and what a graph returns keeps its
            memory.
        accepted: what became of the drafts.
    """

    output: TargetOutput
    accepted: Accepted


class StepGraphs:
    """Captured stages of a server, and the buffers that they read and write.

    Args:
        eager: the same stages, run eagerly, which are captured.
        model_runner: SGLang's, of the target.
        request_slots: batch sizes to capture, ascending.
        depth: drafts per request that captured steps have room for.
        seed: of the engine's noise.
        relay: where graphs that judge enter the outcome for the next step; None if it is not read there.
        judges: whether greedy batches are judged and committed in the graph that verifies them. Not where something
            looks at the logits first.

    Attributes:
        tiers: sizes that were captured.
        adapters: of the target, which requests name; None on a server without them.
        draft: by request slots, and whether some requests are sampled.
        verify: the forward alone, by rows, and whether the step is plain.
        judged: everything from the forward to the commit, likewise; in a plain step from the plan on.
        plans: the buffers of the plan that both of them read.
    """

    def __init__(
        self,
        eager: EagerStages,
        model_runner: Any,
        request_slots: list[int],
        depth: int,
        seed: int,
        *,
        relay: Relay | None = None,
        judges: bool = True,
    ) -> None:
        self._free_before = torch.cuda.mem_get_info()[0]
        self.eager, self.depth, self.relay = eager, depth, relay
        self._judges = judges and not eager.agreement.needed  # ranks settle the outcome before the commit
        self._runner, self._seed = model_runner, seed
        self._req_to_token: torch.Tensor = model_runner.req_to_token_pool.req_to_token
        self.tiers = Tiers.of(request_slots, depth)
        most, device = self.tiers.requests[-1], self._req_to_token.device
        num_rows = max((most, *self.tiers.tokens))
        forecast = eager.schedule.forecast
        self.prepared = _zeroed(PreparedStep.empty(most, eager.drafter.num_slots, device))
        self.step_number = torch.zeros((), dtype=torch.int64, device=device)
        self.temperatures = torch.zeros(most, device=device)
        self.coefficients = forecast.coefficients.clone()
        self._copied_coefficients = forecast.coefficients
        self.drafts = torch.zeros((most, depth), dtype=torch.int64, device=device)
        scores = torch.zeros((2, most, depth), device=device)
        self._scores = Confidence(None if forecast.calibration is None else scores[0], scores[1])
        self._rows = _zeroed(VerifyRows.empty(most, num_rows, device))
        self._logits = logits_buffer(model_runner, num_rows)
        self.adapters = CapturedAdapters.of(model_runner, most)
        self.draft: dict[tuple[int, bool], Captured[DraftBlock]] = {}
        self.verify: dict[tuple[int, bool], Captured[TargetOutput]] = {}
        self.judged: dict[tuple[int, bool], Captured[Judged]] = {}
        self.plans: dict[tuple[int, bool], VerifyPlan] = {}
        self._views: dict[tuple[Hashable, ...], Any] = {}

    def capture(self) -> None:
        """Capture every tier; takes seconds."""
        began = time.monotonic()
        with torch.no_grad(), capturing(self._runner) as capture:
            # Drafts first: the law of sampled drafts is read after the verification was replayed.
            if self.depth > 0:
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
            len(self.draft) + len(self.verify) + len(self.judged),
            self.tiers.requests[-1],
            len(self._logits),
            time.monotonic() - began,
            (self._free_before - torch.cuda.mem_get_info()[0]) / 2**30,
        )

    def _capture_draft(self, capture: Capture, slots: int, sampled: bool) -> None:
        drafter, forecast = self.eager.drafter, self.eager.schedule.forecast
        step = self._static_step(slots, sampled)

        def run() -> DraftBlock:
            block = drafter.propose(step, self.depth, with_confidence=True, layout=self.prepared.block(slots))
            confidence = forecast.predict(block.confidence_logits, slots, self.depth, self.coefficients)
            self._keep(block, confidence)
            # For every tier of rows: which one verifies, the host has yet to choose.
            plan_staged(
                confidence.survival, self.prepared.numbers, self.drafts[:slots], self.requests_of(slots), self._rows
            )
            return block

        self.draft[slots, sampled] = capture(run)

    def _keep(self, block: DraftBlock, confidence: Confidence | None) -> None:
        bs = len(block.tokens)
        self.drafts[:bs] = block.tokens
        if confidence is not None:
            for kept, new in zip(vars(self._scores).values(), vars(confidence).values(), strict=True):
                if new is not None:
                    kept[:bs] = new

    def _capture_verify(self, capture: Capture, rows: int, plain: bool) -> None:
        eager, step = self.eager, self._static_step(self.slots_of(rows), False)
        plan = VerifyPlan.of(self._rows_of(rows), 1 if plain else self.depth + 1)
        self.plans[rows, plain] = plan
        self.verify[rows, plain] = capture(static_verify(self._runner, step, plan, self._logits[:rows], self.adapters))
        if not self._judges:
            return
        forward = static_verify(self._runner, step, plan, None, self.adapters)
        block = DraftBlock(self.drafts[: len(step), : plan.width - 1])
        drafted = Drafted(block, None, [plan.width - 1] * len(step))

        def run() -> Judged:
            if plain:
                plan_uniform(0, block.tokens, step_requests, rows, plan)
            output = forward()
            accepted = eager.accept(step, drafted, plan, output)
            eager.commit(plan, accepted, output)
            if self.relay is not None:
                self.relay.write(step.req_pool_indices, accepted)
            output.logits_output.next_token_logits = None
            return Judged(output._replace(captured=self._logits.new_empty(0)), accepted)

        step_requests = self.requests_of(len(step))
        self.judged[rows, plain] = capture(run)

    def slots_of(self, rows: int) -> int:
        """Request slots of a verification with so many rows: each request has at least one."""
        return min(rows, self.tiers.requests[-1])

    def _rows_of(self, rows: int) -> VerifyRows:
        """The part of the buffers that belongs to a tier of rows."""
        whole, slots = self._rows, self.slots_of(rows)
        return VerifyRows(
            verify_lens=whole.verify_lens[:slots],
            indptr=whole.indptr[: slots + 1],
            requests=whole.requests[:rows],
            columns=whole.columns[:rows],
            input_ids=whole.input_ids[:rows],
            positions=whole.positions[:rows],
            slots=whole.slots[:rows],
        )

    def requests_of(self, slots: int) -> StepRequests:
        """The staged requests, padded to ``slots``."""
        return self.once(lambda: self.prepared.requests(self._req_to_token, slots), "requests", slots)

    def once(self, make: Callable[[], V], *key: Hashable) -> V:
        """What ``make`` returns, views of a step's part of the buffers, which are made once for every ``key``."""
        if key not in self._views:
            self._views[key] = make()
        return cast("V", self._views[key])

    def _static_step(self, slots: int, sampled: bool) -> DecodeBatch:
        requests = self.requests_of(slots)
        temperatures = self.temperatures[:slots] if sampled else None
        return DecodeBatch(
            anchors=requests.anchors,
            prefix_lens=requests.prefix_lens,
            req_pool_indices=requests.req_pool_indices,
            req_to_token=requests.req_to_token,
            rows=SamplingRows.by_temperature(slots, temperatures, self._req_to_token.device),
            # The kernels key their noise by slot; positions matter to seeded requests only.
            keys=RoundKeys(self._seed, self.step_number, requests.req_pool_indices, requests.prefix_lens),
        )

    def draft_slots(self, step: DecodeBatch, slots: int) -> int | None:
        """Request slots of the graph that drafts for ``step``; None where drafts are launched.

        Args:
            slots: of a greedy draft.
        """
        if step.rows.any_seeded:
            return None
        return self.tiers.sampled_slots(len(step)) if step.rows.any_sampled else slots

    def launch_draft(self, step: DecodeBatch, with_confidence: bool) -> DraftBlock:
        """Draft for all requests of a step whose drafts were not captured, into the buffers."""
        requests, forecast = len(step), self.eager.schedule.forecast
        block = self.eager.drafter.propose(step, self.depth, with_confidence)
        self._keep(block, forecast.predict(block.confidence_logits, requests, self.depth) if with_confidence else None)
        return replace(block, tokens=self.drafts[:requests])

    def replay_draft(self, step: DecodeBatch, slots: int) -> DraftBlock:
        """Draft for all requests of the staged step, and plan by the numbers that were staged, into the buffers."""
        requests, sampled = len(step), step.rows.any_sampled
        if sampled:
            self.temperatures[:requests] = step.rows.draw_temperatures
            self.temperatures[requests:slots] = 0
            self.step_number.fill_(step.keys.step)
        self._refresh_coefficients()
        block = self.draft[slots, sampled].replay()
        return self.once(partial(self._block, block, requests), "block", slots, sampled, requests)

    def _block(self, block: DraftBlock, requests: int) -> DraftBlock:
        """The first requests of a captured block, whose tokens are those that are verified."""
        return replace(block.first(requests), tokens=self.drafts[:requests])

    def confidence_of(self, requests: int) -> Confidence:
        """Of the step's requests; the next draft overwrites it."""
        return self.once(lambda: self._scores.first(requests), "confidence", requests)

    def _refresh_coefficients(self) -> None:
        """Take over what calibration has learned."""
        latest = self.eager.schedule.forecast.coefficients
        if self._copied_coefficients is not latest:
            self.coefficients.copy_(latest)
            self._copied_coefficients = latest

    def outcome(self, tier: tuple[int, bool], requests: int) -> Accepted:
        """Return what became of a tier's first requests; the next step's replay overwrites it."""
        accepted = self.judged[tier].output.accepted
        return Accepted(*(part[:requests] for part in vars(accepted).values()))

    def stage(self, step: DecodeBatch, decision: StepDecision) -> GraphStages | None:
        """Copy ``step`` into the buffers.

        None when its shape was not captured, when presets propose drafts for it, or when only the device knows how many
        drafts it verifies at most.
        """
        requests = len(step)
        slots = self.tiers.request_slots(requests)
        drafts = decision.max_drafts(requests)
        if slots is None or drafts is None or decision.has_copies:
            return None
        plain = decision.draft_len == 0
        rows = slots if plain else self.tiers.token_rows(requests + drafts)
        if rows is None:
            return None
        drafter, numbers = self.eager.drafter, None if self.eager.agreement.needed else decision.plan_numbers(requests)
        prepare(step.requests, drafter.num_slots, drafter.mask_token_id, self.prepared, numbers or PlanNumbers())
        judged = (rows, plain) in self.judged and step.rows.all_greedy and not step.keeps_logits
        return GraphStages(self, slots, (rows, plain), judged=judged, plans=numbers is not None)


class GraphStages:
    """The stages of one staged step.

    Attributes:
        in_graphs: they are replayed.

    Args:
        slots: request slots of the tier that drafts greedy requests.
        tier: rows of the tier that verifies, and whether the step is plain.
        judged: whether the graph that verifies goes on to the commit; of a plain step it begins with the plan.
        plans: whether a graph that drafts plans as the decision demands.
    """

    in_graphs = True

    def __init__(self, graphs: StepGraphs, slots: int, tier: tuple[int, bool], *, judged: bool, plans: bool) -> None:
        self._graphs, self._eager = graphs, graphs.eager
        self._slots, self._tier, self._judged, self._plans = slots, tier, judged, plans
        self._planned = judged and tier[1]

    def draft(self, step: DecodeBatch, decision: StepDecision) -> Drafted:
        """Propose blocks for all requests: on a GPU a few less take no less time."""
        requests, graphs = len(step), self._graphs
        if self._tier[1]:
            return Drafted(DraftBlock.empty(requests, step.anchors.device), None, [0] * requests)
        slots = graphs.draft_slots(step, self._slots)
        if slots is None:
            block = graphs.launch_draft(step, decision.with_confidence)
        else:
            block, self._planned = graphs.replay_draft(step, slots), self._plans
        confidence = graphs.confidence_of(requests) if decision.with_confidence else None
        return Drafted(block, confidence, decision.draft_lens(requests))

    def plan(self, step: DecodeBatch, drafted: Drafted, decision: StepDecision) -> VerifyPlan:
        """Choose which drafts are verified, and lay out the rows of the tier, where no graph does so."""
        graphs, slots = self._graphs, self._graphs.slots_of(self._tier[0])
        if self._planned:
            return graphs.plans[self._tier]
        selected, tokens = decision.select(drafted), drafted.block.tokens
        self._eager.agreement.adopt(tokens, selected.synced)
        if tokens.numel() and tokens.data_ptr() != graphs.drafts.data_ptr():  # made elsewhere
            graphs.drafts[: len(tokens), : tokens.shape[1]] = tokens
        drafts = graphs.once(lambda: graphs.drafts[:slots], "drafts", slots)
        return build_plan(graphs.requests_of(slots), drafts, selected, graphs.plans[self._tier])

    def verify(self, batch: Any, step: DecodeBatch, plan: VerifyPlan) -> TargetOutput:
        """Run the target over the tier, whose buffers hold the plan; judge and commit where nothing forbids it."""
        graphs = self._graphs
        if graphs.adapters is not None:
            graphs.adapters.stage(batch)
        if not self._judged:
            return graphs.verify[self._tier].replay()
        return graphs.judged[self._tier].replay().output

    def accept(self, step: DecodeBatch, drafted: Drafted, plan: VerifyPlan, output: TargetOutput) -> Accepted:
        """Judge the drafts, where verifying has not done so."""
        requests, graphs, tier = len(step), self._graphs, self._tier
        if self._judged:
            accepted = graphs.once(partial(graphs.outcome, tier, requests), "accepted", *tier, requests)
            if graphs.relay is None:
                return _kept(accepted)
            graphs.relay.was_written(accepted)
            return accepted
        part = graphs.once(partial(_of_requests, plan, requests), "plan", *tier, requests)
        return self._eager.accept(step, drafted, part, output)

    def commit(self, plan: VerifyPlan, accepted: Accepted, output: TargetOutput) -> None:
        """Write the draft K/V of the committed rows, where verifying has not done so."""
        if not self._judged:
            self._eager.commit(plan, accepted, output)


def _kept(accepted: Accepted) -> Accepted:
    """The outcome, with what SGLang hands to the next step and its replays in memory that they do not write to."""
    return replace(accepted, bonus_tokens=accepted.bonus_tokens.clone(), new_seq_lens=accepted.new_seq_lens.clone())


def _of_requests(plan: VerifyPlan, requests: int) -> VerifyPlan:
    """The same rows, of the first requests alone."""
    return replace(plan, verify_lens=plan.verify_lens[:requests], indptr=plan.indptr[: requests + 1])


def _zeroed(buffers: T) -> T:
    """Return what a capture's warm-up computes with: no context, no rows, token 0."""
    for tensor in vars(buffers).values():
        tensor.zero_()
    return buffers
