"""The stages of a decode step as CUDA graphs: drafting by request slots, verification and acceptance by rows.

A step is staged into buffers that stay where they are, in the smallest tier that has room for it. What is not the
step's is padding: request slots without context whose results nobody reads, rows of no request.
"""

from __future__ import annotations

import logging
import time
from dataclasses import replace
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from dspark_kernels import Accepted, DraftBlock, RoundKeys, SamplingRows
from dspark_kernels.plan import VerifyRows, plan_top, plan_uniform
from dspark_kernels.prepare import PreparedStep, StepRequests, prepare

from sglang_dspark.engine.forward.graphs import Capture, Captured, capturing, static_verify
from sglang_dspark.scheduling.ranking import ranked
from sglang_dspark.step.choice import Choice, Rule
from sglang_dspark.step.state import DecodeBatch, Drafted, VerifyPlan
from sglang_dspark.worker.tiers import Tiers

if TYPE_CHECKING:
    from sglang_dspark.worker.worker import DSparkWorker

T = TypeVar("T", PreparedStep, VerifyRows)

logger = logging.getLogger(__name__)

# Rules whose number of rows is part of the choice; the others wait for the device anyway.
RULES = (Rule.TOP, Rule.UNIFORM)


class StepGraphs:
    """Captured stages of one worker, and the buffers that they read and write.

    Attributes:
        tiers: sizes that were captured.
    """

    def __init__(self, worker: DSparkWorker, request_slots: list[int]) -> None:
        self._free_before = torch.cuda.mem_get_info()[0]
        self.worker = worker
        self.depth, device = worker.graph_depth, worker.device
        self.tiers = Tiers.of(request_slots, self.depth)
        most = self.tiers.requests[-1]
        num_rows = max((most, *self.tiers.tokens))
        self.prepared = _zeroed(PreparedStep.empty(most, worker.drafter.num_slots, device))
        self.step_number = torch.zeros((), dtype=torch.int64, device=device)
        self.temperatures = torch.zeros(most, device=device)
        self.coefficients = worker.schedule.forecast.coefficients.clone()
        self._copied_coefficients = worker.schedule.forecast.coefficients
        self.drafts = torch.zeros((most, self.depth), dtype=torch.int64, device=device)
        self.predictions = torch.zeros((2, most, self.depth), device=device)
        self._rows = _zeroed(VerifyRows.empty(most, num_rows, device))
        self._logits = torch.empty((num_rows, worker.target_worker.model_config.vocab_size), device=device)
        self.draft: dict[tuple[int, bool], Captured[DraftBlock]] = {}
        self.verify: dict[tuple[int, bool], Captured[tuple[Any, torch.Tensor]]] = {}
        self.accept: dict[tuple[int, bool], Captured[Accepted]] = {}

    def capture(self) -> None:
        """Capture every tier; takes seconds."""
        began = time.monotonic()
        with torch.no_grad(), capturing(self.worker.target_worker.model_runner) as capture:
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
        worker, step = self.worker, self._static_step(slots, sampled)

        def run() -> DraftBlock:
            block = worker.drafter.propose(step, self.depth, with_confidence=True, layout=self.prepared.block(slots))
            self.drafts[:slots] = block.tokens
            self.predictions[:, :slots] = worker.schedule.forecast.predict(
                block.confidence_logits, slots, self.depth, self.coefficients
            )
            return block

        self.draft[slots, sampled] = capture(run)

    def _capture_verify(self, capture: Capture, rows: int, plain: bool) -> None:
        worker, plan, step = self.worker, self.plan_of(rows, plain), self._static_step(self.slots_of(rows), False)
        runner = worker.target_worker.model_runner
        verify = capture(static_verify(runner, step, plan, self._logits[:rows]))
        self.verify[rows, plain] = verify
        if worker.agreement.needed:
            return  # ranks settle the outcome between the forward and the commit
        output, captured = verify.output
        drafts = self.drafts[: len(step), : plan.width - 1]

        def run() -> Accepted:
            accepted = worker.accept(step, DraftBlock(drafts, None, None), plan, output)
            worker.commit(plan, accepted, captured)
            return accepted

        self.accept[rows, plain] = capture(run)

    def slots_of(self, rows: int) -> int:
        """Request slots of a verification with so many rows: each request has at least one."""
        return min(rows, self.tiers.requests[-1])

    def rows_of(self, rows: int) -> VerifyRows:
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

    def plan_of(self, rows: int, plain: bool) -> VerifyPlan:
        """The same as a plan."""
        return VerifyPlan(lens_cpu=None, width=1 if plain else self.depth + 1, **vars(self.rows_of(rows)))

    def requests_of(self, slots: int) -> StepRequests:
        """The staged requests, padded to ``slots``."""
        return self.prepared.requests(self.worker.req_to_token, slots)

    def _static_step(self, slots: int, sampled: bool) -> DecodeBatch:
        requests = self.requests_of(slots)
        return DecodeBatch(
            anchors=requests.anchors,
            prefix_lens=requests.prefix_lens,
            req_pool_indices=requests.req_pool_indices,
            req_to_token=requests.req_to_token,
            rows=SamplingRows.by_temperature(slots, self.temperatures[:slots] if sampled else None, self.worker.device),
            # The kernels key their noise by slot; positions matter to seeded requests only.
            keys=RoundKeys(
                self.worker.target_worker.random_seed, self.step_number, requests.req_pool_indices, requests.prefix_lens
            ),
        )

    def refresh_coefficients(self) -> None:
        """Take over what calibration has learned."""
        latest = self.worker.schedule.forecast.coefficients
        if self._copied_coefficients is not latest:
            self.coefficients.copy_(latest)
            self._copied_coefficients = latest

    def stage(self, step: DecodeBatch, choice: Choice) -> GraphStages | None:
        """Copy ``step`` into the buffers; None when its shape was not captured, or presets propose drafts for it."""
        requests = len(step)
        slots = self.tiers.request_slots(requests)
        if slots is None or choice.rule not in RULES or choice.has_copies:
            return None
        plain = choice.depth == 0
        drafts = requests * choice.depth if choice.rule is Rule.UNIFORM else choice.budget
        rows = slots if plain else self.tiers.token_rows(requests + drafts)
        if rows is None:
            return None
        prepare(step.requests, self.worker.drafter.num_slots, self.worker.drafter.mask_token_id, out=self.prepared)
        return GraphStages(self, slots, rows, plain)


class GraphStages:
    """The stages of one staged step; each does what the worker's method of its name does."""

    def __init__(self, graphs: StepGraphs, slots: int, rows: int, plain: bool) -> None:
        self._graphs, self._worker = graphs, graphs.worker
        self._slots, self._rows, self._plain = slots, rows, plain
        self._committed = False

    def draft(self, step: DecodeBatch, choice: Choice, rows: SamplingRows, with_confidence: bool) -> Drafted:
        """Propose blocks for all requests: on a GPU a few less take no less time."""
        requests, graphs = len(step), self._graphs
        if self._plain:
            return Drafted(None, None, [0] * requests)
        sampled = step.rows.any_sampled
        slots = graphs.tiers.sampled_slots(requests) if sampled else self._slots
        if step.rows.any_seeded or slots is None:
            block = self._worker.drafter.propose(step, graphs.depth, with_confidence)
            graphs.drafts[:requests] = block.tokens
            if with_confidence:
                graphs.predictions[:, :requests] = self._worker.schedule.forecast.predict(
                    block.confidence_logits, requests, graphs.depth
                )
        else:
            if sampled:
                graphs.temperatures[:requests] = step.rows.draw_temperatures
                graphs.temperatures[requests:slots] = 0
                graphs.step_number.fill_(step.keys.step)
            graphs.refresh_coefficients()
            block = graphs.draft[slots, sampled].replay().first(requests)
        parked = () if choice.drafted is None else set(range(requests)).difference(choice.drafted)
        return Drafted(
            block=replace(block, tokens=graphs.drafts[:requests]),
            # Outlives the step, and the next replay overwrites the buffers.
            predictions=graphs.predictions[:, :requests].clone() if with_confidence else None,
            depths=[0 if request in parked else choice.depth for request in range(requests)],
        )

    def plan(self, step: DecodeBatch, drafted: Drafted, choice: Choice) -> VerifyPlan:
        """Lay out the rows of the tier."""
        graphs, requests = self._graphs, len(step)
        drafts = None
        if drafted.block is not None:
            drafts = graphs.drafts[: graphs.slots_of(self._rows)]
            self._worker.agreement.adopt(graphs.drafts[:requests])
        given, out = graphs.requests_of(graphs.slots_of(self._rows)), graphs.rows_of(self._rows)
        if choice.is_uniform(requests):
            plan_uniform(choice.depth, drafts, given, self._rows, out)
        else:
            assert drafts is not None
            if choice.singles_out:
                graphs.predictions[1, :requests] = ranked(choice, drafted)
            self._worker.agreement.adopt(graphs.predictions[1, :requests])
            plan_top(graphs.predictions[1, : len(drafts)], choice.budget, drafts, given, self._rows, out)
        return graphs.plan_of(self._rows, self._plain)

    def verify(self, batch: Any, step: DecodeBatch, plan: VerifyPlan) -> tuple[Any, torch.Tensor]:
        """Run the target over the tier."""
        return self._graphs.verify[self._rows, self._plain].replay()

    def accept(self, step: DecodeBatch, block: DraftBlock | None, plan: VerifyPlan, output: Any) -> Accepted:
        """Judge the drafts; those of greedy batches whose logits stay as they are, are committed on the way."""
        requests = len(step)
        if step.rows.all_greedy and not step.adjusted and not self._worker.agreement.needed:
            self._committed = True
            if self._worker.profile is not None:
                self._graphs.step_number.fill_(step.keys.step)
            accepted = self._graphs.accept[self._rows, self._plain].replay()
            return Accepted(*(part[:requests].clone() for part in vars(accepted).values()))
        part = replace(plan, verify_lens=plan.verify_lens[:requests], indptr=plan.indptr[: requests + 1])
        return self._worker.accept(step, block, part, output)

    def commit(self, plan: VerifyPlan, accepted: Accepted, captured: torch.Tensor) -> None:
        """Write the draft K/V of the committed rows."""
        if not self._committed:
            self._worker.commit(plan, accepted, captured)


def _zeroed(buffers: T) -> T:
    """What a capture's warm-up computes with: no context, no rows, token 0."""
    for tensor in vars(buffers).values():
        tensor.zero_()
    return buffers
