"""Mixed chunks: while a prompt is encoded, each running request gets a token from the same forward at least.

Chunks are bounded: above by the time that running requests may wait, below so that prompts go on. What a mixed step
gives to running requests counts as what a non-speculative step gives them.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable, Mapping
from functools import partial
from typing import TYPE_CHECKING

import torch
from sglang.srt.plugins.hook_registry import HookType

from sglang_dspark.config import flag_name
from sglang_dspark.engine.batch import DECODED_WITH_PREFILL, is_running, prompts_of
from sglang_dspark.engine.draft_input import forget_step, spare_slots
from sglang_dspark.engine.feature import Check, Feature, LaunchContext, Stage
from sglang_dspark.engine.hooks import Moment, hook
from sglang_dspark.engine.part import Part, Worker, part_of
from sglang_dspark.engine.scheduler import driver_of
from sglang_dspark.engine.sglang_types import GenerationBatchResult, Req, ScheduleBatch
from sglang_dspark.engine.worker_base import SpecWorkerBase
from sglang_dspark.scheduling.policies import LEAST_ROWS, ChunkLimit, least_gap_ms
from sglang_dspark.step.decision import PLAIN, StepRecord
from sglang_dspark.step.packed import DeviceSpan, DeviceTimer

if TYPE_CHECKING:
    from sglang.srt.managers.schedule_batch import ScheduleBatch as RunningBatch
    from sglang.srt.managers.scheduler import Scheduler
    from sglang.srt.managers.scheduler_components.batch_result_processor import SchedulerBatchResultProcessor

    Prefill = tuple[RunningBatch | None, RunningBatch]

logger = logging.getLogger(__name__)


def bound_without_chunks(context: LaunchContext) -> str | None:
    """Refuse a bound on gaps on a server whose prompts stop everything else."""
    args, bound = context.args, context.server.config.max_gap_ms
    if bound is None or (args.enable_mixed_chunk and args.chunked_prefill_size > 0):
        return None
    return (
        f"{flag_name('max_gap_ms')}={bound} cuts the chunks of prompts that run together with decode steps; pass "
        "--enable-mixed-chunk, and no --chunked-prefill-size of 0 or less"
    )


class BoundedGaps(Part):
    """Time the steps that encode prompts, and say how many rows the next one may have.

    Args:
        worker: ours, of which all ranks have chunks of the same length.
        bound_ms: of a step.

    Attributes:
        waited_for: whether requests run while the next chunk is encoded.
    """

    def __init__(self, worker: Worker, bound_ms: float) -> None:
        self._worker, self._bound_ms, self._limit = worker, bound_ms, ChunkLimit(bound_ms)
        self._least_rows = max(LEAST_ROWS, worker.server_args.page_size or 1)
        self._timer, self._on_gpu = DeviceTimer(worker.device), worker.device.type == "cuda"
        self._began: tuple[DeviceSpan, float] | None = None
        self.waited_for = False
        self._timed: deque[tuple[int, bool, DeviceSpan, float]] = deque(maxlen=2)  # spans that may still be read

    @classmethod
    def of(cls, worker: Worker) -> BoundedGaps | None:
        """Return the part of a worker; None without a bound."""
        bound_ms = worker.options.max_gap_ms
        return None if bound_ms is None else cls(worker, bound_ms)

    def ready(self) -> None:
        """Say in the log which gaps can be kept."""
        flag, least_ms = f"{flag_name('max_gap_ms')}={self._bound_ms:g}", self._least_ms()
        if least_ms is None:
            logger.info("DSPARK: %s: without step times it is not known whether this machine can keep it", flag)
        elif least_ms <= self._bound_ms:
            logger.info("DSPARK: %s can be kept: the shortest step with a prompt takes %.1f ms", flag, least_ms)
        else:
            logger.warning(
                "DSPARK: %s cannot be kept on this machine: the shortest chunk of a prompt has %d tokens, and a step "
                "with it and one running request takes %.1f ms. Chunks are that short now, and %.1f ms is the least "
                "bound that can be kept",
                flag,
                self._least_rows,
                least_ms,
                least_ms,
            )

    def describe(self) -> Mapping[str, object]:
        least_ms = self._least_ms()
        kept_ms = None if least_ms is None else max(self._bound_ms, least_ms)
        return {"gaps": {"max_gap_ms": self._bound_ms, "least_gap_ms": least_ms, "kept_gap_ms": kept_ms}}

    def _least_ms(self) -> float | None:
        """Return the milliseconds of the shortest step next to a prompt; None if step times are not known."""
        times = self._worker.schedule.times
        return None if times is None else least_gap_ms(times, self._least_rows)

    def prefill_comes(self, batch: ScheduleBatch) -> None:
        self._began = self._timer.begin(), time.perf_counter()

    def prefill_done(self, batch: ScheduleBatch) -> None:
        assert self._began is not None, "a prefill comes before it is done"
        span, began = self._began
        span.end()
        host_ms, decoded = (time.perf_counter() - began) * 1e3, vars(batch).get(DECODED_WITH_PREFILL)
        rows = batch.extend_num_tokens + (0 if decoded is None else len(decoded))
        # No bound holds for a chunk that no request waits for, and the next one may have a longer context.
        if self.waited_for:
            self._timed.append((rows, decoded is not None and decoded.drafted, span, host_ms))

    def rows(self, running: int) -> int:
        """Return how many rows the next step may have with so many running requests, theirs included."""
        while self._timed:
            rows, drafted, span, host_ms = self._timed[0]
            ms = self._worker.agreement.share(span.ms if self._on_gpu else host_ms)
            if ms is None:
                break
            self._timed.popleft()
            self._limit.learn(rows, ms, drafted=drafted)
        return self._limit.rows_with(running)


@hook(
    "sglang.srt.managers.scheduler.Scheduler._get_new_batch_prefill_raw",
    HookType.AROUND,
    where="any_worker",
    reason="SGLang's chunks have one size, whatever they take, and leave prompts none of it if as many requests run",
)
def bound_chunk(
    original: Callable[..., Prefill],
    scheduler: Scheduler,
    prefill_delayer_single_pass: object,
    running_batch: RunningBatch,
) -> Prefill:
    """Bound SGLang's next chunk while requests run: each of them has a row of it, and prompts have a page at least.

    Whether prompts wait is not known yet: SGLang takes those whose grammars have been compiled into its queue after
    this. By its own size a prompt would wait for as long as that many requests run. A prompt that has begun gets no
    more slots than the running ones leave, which have taken some since; SGLang would end the server. If there are none,
    the running ones go on alone, or are retracted.
    """
    whole, running = scheduler.chunked_prefill_size, len(running_batch.reqs)
    part = part_of(driver_of(scheduler).parts, BoundedGaps)
    if part is not None:
        part.waited_for = running > 0
    if whole is None or not running:
        return original(scheduler, prefill_delayer_single_pass, running_batch)
    bound = whole if part is None else min(whole, part.rows(running))
    if scheduler.chunked_req is not None:
        spare = spare_slots(scheduler.token_to_kv_pool_allocator, scheduler.tree_cache)
        room = spare - running_batch.new_tokens_required_next_decode()
        if room < scheduler.page_size:
            _retract_last(scheduler, running_batch)
            return None, running_batch
        bound = min(bound, running + room)
    scheduler.chunked_prefill_size = max(bound, running + scheduler.page_size)
    try:
        return original(scheduler, prefill_delayer_single_pass, running_batch)
    finally:
        scheduler.chunked_prefill_size = whole


def _retract_last(scheduler: Scheduler, running_batch: RunningBatch) -> None:
    """Retract the only request that runs if its next step does not fit next to a prompt that has begun.

    SGLang never retracts the last one: it would end it with an error, though the prompt's slots come free again.
    """
    if scheduler._reqs_finishing_inflight(running_batch):
        return  # the result that is due frees slots
    if len(running_batch.reqs) != 1 or running_batch.check_decode_mem():
        return
    [req] = running_batch.reqs
    running_batch.release_req(0, 0)
    running_batch.filter_batch(keep_indices=[])
    running_batch.batch_is_full = False
    scheduler._add_request_to_queue(req, is_retracted=True)


@hook(
    "sglang.srt.managers.scheduler_components.batch_result_processor.SchedulerBatchResultProcessor.process_batch_result_prefill",
    HookType.BEFORE,
    where="any_worker",
    reason="SGLang counts a step for running requests only in the results of decode steps",
)
def count_running(
    processor: SchedulerBatchResultProcessor, batch: ScheduleBatch, result: GenerationBatchResult
) -> None:
    """Show the step to the worker, and count it for its running requests, before SGLang appends their tokens."""
    prompts, worker = len(prompts_of(batch)), processor.model_worker
    if isinstance(worker, SpecWorkerBase):  # ours
        forget_step(batch.decoding_reqs or ())
    places = [prompts + place for place, req in enumerate(batch.decoding_reqs or ()) if is_running(req)]
    if not places:
        return
    running = [batch.reqs[place] for place in places]
    if result.copy_done is not None:
        result.copy_done.synchronize()
    for req in running:
        req.spec_verify_ct += 1
        req.spec_num_cap_tokens += 1
        req.update_spec_correct_drafts_histogram(0)
        req.update_spec_cap_lens_histogram(1)
        req.update_finish_state = partial(_commit_at_end, req)
    # Of a step that has drafted none, and given each of them a token.
    none, schedule = [0] * len(running), worker.schedule
    record = StepRecord(
        requests=[req.rid for req in running],
        decision=PLAIN,
        drafted=none,
        verify_lens=torch.tensor(none),
        confidence=None,
        traced=torch.tensor([[req.seqlen - 1, req.output_ids[-1]] for req in running]),
        committed=result.next_token_ids[places, None].cpu(),
        policy=schedule.policy.name,
        parked=schedule.parked,
    )
    worker.control.observe(running, record, [1] * len(running), None)


def _commit_at_end(req: Req, *new_tokens: int) -> None:
    """Take the place of SGLang's ``update_finish_state`` once: count the anchor of a request that ends.

    SGLang counts the anchors of a mixed step as committed for requests that go on alone. The prefix cache would take
    the recurrent state of one that ends for that of a text without its last token.
    """
    del req.update_finish_state
    req.update_finish_state(*new_tokens)
    if req.finished():
        req.kv.kv_committed_len += 1


@hook(
    "sglang.srt.managers.scheduler.Scheduler.is_disable_overlap_for_batch",
    HookType.AROUND,
    where="any_worker",
    reason="under overlap SGLang would launch a mixed step while grammars lack the tokens of the step before",
    by=Moment.SOME_TIME,  # under overlap
)
def wait_for_grammars(
    original: Callable[..., bool], scheduler: Scheduler, batch: ScheduleBatch | None, last_batch: ScheduleBatch | None
) -> bool:
    """Return whether SGLang processes the result of the step before first: grammars of running requests follow it."""
    if original(scheduler, batch, last_batch):
        return True
    if batch is None or not batch.forward_mode.is_mixed() or not scheduler.result_queue:
        return False
    return any(req.grammar is not None for req in batch.decoding_reqs or ())


FEATURE = Feature(
    __name__,
    is_used=lambda args: args.enable_mixed_chunk,
    checks=(Check("bound on gaps", Stage.FLAGS, bound_without_chunks),),
    part=BoundedGaps.of,
)
