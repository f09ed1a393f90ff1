"""The stages of a decode step as CUDA graphs: drafting by request slots, verification and acceptance by rows.

A step is staged into buffers that stay where they are, in the smallest tier that has room for it. What is not the
step's is padding: request slots without context whose results nobody reads, rows of no request.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Hashable
from dataclasses import replace
from functools import partial
from typing import Any, TypeVar, cast

import torch
from dspark_kernels import (
    Accepted,
    DraftBlock,
    PreparedStep,
    RoundKeys,
    SamplingRows,
    StepRequests,
    VerifyRows,
    prepare,
)

from sglang_dspark.engine.forward.adapters import CapturedAdapters
from sglang_dspark.engine.forward.graphs import Capture, Captured, capturing, logits_buffer, static_verify
from sglang_dspark.step.choice import Choice
from sglang_dspark.step.confidence import Confidence
from sglang_dspark.step.state import DecodeBatch, Drafted, TargetOutput, VerifyPlan
from sglang_dspark.worker.stages import EagerStages
from sglang_dspark.worker.tiers import Tiers
from sglang_dspark.worker.verify_plan import lay_out

T = TypeVar("T", PreparedStep, VerifyRows)
V = TypeVar("V")

logger = logging.getLogger(__name__)


class StepGraphs:
    """Captured stages of a server, and the buffers that they read and write.

    Args:
        eager: the same stages launch by launch, which are captured.
        model_runner: SGLang's, of the target.
        request_slots: batch sizes to capture, ascending.
        depth: drafts per request that captured steps have room for.
        seed: of the engine's noise.

    Attributes:
        tiers: sizes that were captured.
        adapters: of the target, which requests name; None on a server without them.
    """

    def __init__(self, eager: EagerStages, model_runner: Any, request_slots: list[int], depth: int, seed: int) -> None:
        self._free_before = torch.cuda.mem_get_info()[0]
        self.eager, self.depth = eager, depth
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
        # Logits and survivals; without a head, the logits stay as they are.
        self._scores = torch.full((2, most, depth), torch.nan, device=device).unbind()
        self._rows = _zeroed(VerifyRows.empty(most, num_rows, device))
        self._logits = logits_buffer(model_runner, num_rows)
        self.adapters = CapturedAdapters.of(model_runner, most)
        self.draft: dict[tuple[int, bool], Captured[DraftBlock]] = {}
        self.verify: dict[tuple[int, bool], Captured[TargetOutput]] = {}
        self.accept: dict[tuple[int, bool], Captured[Accepted]] = {}
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
            len(self.draft) + len(self.verify) + len(self.accept),
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
            self._keep(block, forecast.predict(block.confidence_logits, slots, self.depth, self.coefficients))
            return block

        self.draft[slots, sampled] = capture(run)

    def _keep(self, block: DraftBlock, confidence: Confidence | None) -> None:
        bs = len(block.tokens)
        self.drafts[:bs] = block.tokens
        if confidence is not None:
            logits, survival = self._scores
            survival[:bs] = confidence.survival
            if confidence.logits is not None:
                logits[:bs] = confidence.logits

    def _capture_verify(self, capture: Capture, rows: int, plain: bool) -> None:
        eager, step = self.eager, self._static_step(self.slots_of(rows), False)
        plan = VerifyPlan.of(self._rows_of(rows), 1 if plain else self.depth + 1)
        self.plans[rows, plain] = plan
        verify = capture(static_verify(self._runner, step, plan, self._logits[:rows], self.adapters))
        self.verify[rows, plain] = verify
        if eager.agreement.needed:
            return  # ranks settle the outcome between the forward and the commit
        output = verify.output
        block = DraftBlock(self.drafts[: len(step), : plan.width - 1])
        drafted = Drafted(block, None, [plan.width - 1] * len(step))

        def run() -> Accepted:
            accepted = eager.accept(step, drafted, plan, output)
            eager.commit(plan, accepted, output)
            return accepted

        self.accept[rows, plain] = capture(run)

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

    def draft_block(self, step: DecodeBatch, slots: int, with_confidence: bool) -> DraftBlock:
        """Draft for all requests of the staged step, into the buffers.

        Args:
            slots: request slots of a greedy draft.
        """
        requests, sampled = len(step), step.rows.any_sampled
        captured_slots = self.tiers.sampled_slots(requests) if sampled else slots
        if step.rows.any_seeded or captured_slots is None:
            block = self.eager.drafter.propose(step, self.depth, with_confidence)
            predict = self.eager.schedule.forecast.predict
            self._keep(block, predict(block.confidence_logits, requests, self.depth) if with_confidence else None)
        else:
            if sampled:
                self.temperatures[:requests] = step.rows.draw_temperatures
                self.temperatures[requests:captured_slots] = 0
                self.step_number.fill_(step.keys.step)
            self._refresh_coefficients()
            block = self.draft[captured_slots, sampled].replay()
            return self.once(partial(self._block, block, requests), "block", captured_slots, sampled, requests)
        return replace(block, tokens=self.drafts[:requests])

    def _block(self, block: DraftBlock, requests: int) -> DraftBlock:
        """The first requests of a captured block, whose tokens are those that are verified."""
        return replace(block.first(requests), tokens=self.drafts[:requests])

    def confidence_of(self, requests: int) -> Confidence:
        """Of the step's requests; the next draft overwrites it."""
        return self.once(lambda: Confidence(*(part[:requests] for part in self._scores)), "confidence", requests)

    def _refresh_coefficients(self) -> None:
        """Take over what calibration has learned."""
        latest = self.eager.schedule.forecast.coefficients
        if self._copied_coefficients is not latest:
            self.coefficients.copy_(latest)
            self._copied_coefficients = latest

    def stage(self, step: DecodeBatch, choice: Choice) -> GraphStages | None:
        """Copy ``step`` into the buffers.

        None when its shape was not captured, when presets propose drafts for it, or when only the device knows how many
        drafts it verifies at most.
        """
        requests = len(step)
        slots = self.tiers.request_slots(requests)
        drafts = choice.most_drafts(requests)
        if slots is None or drafts is None or choice.has_copies:
            return None
        plain = choice.depth == 0
        rows = slots if plain else self.tiers.token_rows(requests + drafts)
        if rows is None:
            return None
        drafter = self.eager.drafter
        prepare(step.requests, drafter.num_slots, drafter.mask_token_id, out=self.prepared)
        return GraphStages(self, slots, rows, plain)


class GraphStages:
    """The stages of one staged step.

    Attributes:
        in_graphs: they are replayed.

    Args:
        slots: request slots of the tier that drafts.
        rows: of the tier that verifies.
        plain: whether the step has no drafts.
    """

    in_graphs = True

    def __init__(self, graphs: StepGraphs, slots: int, rows: int, plain: bool) -> None:
        self._graphs, self._eager = graphs, graphs.eager
        self._slots, self._rows, self._plain = slots, rows, plain
        self._committed = False

    def draft(self, step: DecodeBatch, choice: Choice) -> Drafted:
        """Propose blocks for all requests: on a GPU a few less take no less time."""
        requests, graphs = len(step), self._graphs
        if self._plain:
            return Drafted(DraftBlock.empty(requests, step.anchors.device), None, [0] * requests)
        block = graphs.draft_block(step, self._slots, choice.with_confidence)
        confidence = graphs.confidence_of(requests) if choice.with_confidence else None
        return Drafted(block, confidence, choice.depths(requests))

    def plan(self, step: DecodeBatch, drafted: Drafted, choice: Choice) -> VerifyPlan:
        """Choose which drafts are verified, and lay out the rows of the tier."""
        graphs, slots = self._graphs, self._graphs.slots_of(self._rows)
        admitted = self._eager.schedule.admit(choice, drafted)
        self._eager.agreement.adopt(drafted.block.tokens, admitted.decisive)
        drafts = graphs.once(lambda: graphs.drafts[:slots], "drafts", slots)
        return lay_out(graphs.requests_of(slots), drafts, admitted, graphs.plans[self._rows, self._plain])

    def verify(self, batch: Any, step: DecodeBatch, plan: VerifyPlan) -> TargetOutput:
        """Run the target over the tier, whose buffers hold the plan."""
        if self._graphs.adapters is not None:
            self._graphs.adapters.stage(batch)
        return self._graphs.verify[self._rows, self._plain].replay()

    def accept(self, step: DecodeBatch, drafted: Drafted, plan: VerifyPlan, output: TargetOutput) -> Accepted:
        """Judge the drafts; those of greedy batches whose logits stay as they are, are committed on the way."""
        requests, tier = len(step), (self._rows, self._plain)
        if step.rows.all_greedy and not step.adjusted and not self._eager.agreement.needed:
            self._committed = True
            if self._eager.profile is not None:
                self._graphs.step_number.fill_(step.keys.step)
            accepted = self._graphs.accept[tier].replay()
            return self._graphs.once(partial(_first_of, accepted, requests), "accepted", *tier, requests)
        part = self._graphs.once(partial(_of_requests, plan, requests), "plan", *tier, requests)
        return self._eager.accept(step, drafted, part, output)

    def commit(self, plan: VerifyPlan, accepted: Accepted, output: TargetOutput) -> None:
        """Write the draft K/V of the committed rows, where accepting has not done so."""
        if not self._committed:
            self._eager.commit(plan, accepted, output)


def _first_of(accepted: Accepted, requests: int) -> Accepted:
    """What became of the first requests; the next step's replay overwrites it."""
    return Accepted(*(part[:requests] for part in vars(accepted).values()))


def _of_requests(plan: VerifyPlan, requests: int) -> VerifyPlan:
    """The same rows, of the first requests alone."""
    return replace(plan, verify_lens=plan.verify_lens[:requests], indptr=plan.indptr[: requests + 1])


def _zeroed(buffers: T) -> T:
    """What a capture's warm-up computes with: no context, no rows, token 0."""
    for tensor in vars(buffers).values():
        tensor.zero_()
    return buffers
