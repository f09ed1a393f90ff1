"""Bound chunks beside running requests: above by the time that these may wait, below so that prompts go on."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING

import torch

from sglang_dspark.engine.compat.decoder import decoder_of
from sglang_dspark.engine.feature import Part, Worker, part_of
from sglang_dspark.engine.scheduler.agreement import Agreement
from sglang_dspark.engine.scheduler.batch import riders_of
from sglang_dspark.engine.scheduler.draft_input import spare_slots
from sglang_dspark.engine.sglang_types import ScheduleBatch
from sglang_dspark.scheduling.prompts import ChunkLimit
from sglang_dspark.step.device_time import DeviceSpan, DeviceTimer

if TYPE_CHECKING:
    from sglang.srt.managers.schedule_batch import ScheduleBatch as RunningBatch
    from sglang.srt.managers.scheduler import Scheduler

    Prefill = tuple[RunningBatch | None, RunningBatch]


class BoundedGaps(Part):
    """Time the steps that encode prompts, and say how many rows the next one may have.

    Args:
        bound_ms: of a step.
        agreement: of the ranks: chunks are as long on all of them.
        device: of the target.

    Attributes:
        waited_for: whether requests run while the next chunk is encoded.
    """

    def __init__(self, bound_ms: float, agreement: Agreement, device: torch.device) -> None:
        self._limit, self._agreement = ChunkLimit(bound_ms), agreement
        self._timer, self._on_gpu = DeviceTimer(device), device.type == "cuda"
        self._began: tuple[DeviceSpan, float] | None = None
        self.waited_for = False
        self._timed: deque[tuple[int, bool, DeviceSpan, float]] = deque(maxlen=2)  # spans that may still be read

    @classmethod
    def of(cls, worker: Worker) -> BoundedGaps | None:
        """Return the part of a worker; None without a bound."""
        bound_ms = worker.options.max_gap_ms
        return None if bound_ms is None else cls(bound_ms, worker.agreement, worker.device)

    def prefill_comes(self, batch: ScheduleBatch) -> None:
        self._began = self._timer.begin(), time.perf_counter()

    def prefill_done(self, batch: ScheduleBatch) -> None:
        assert self._began is not None, "a prefill comes before it is done"
        span, began = self._began
        span.end()
        host_ms, riders = (time.perf_counter() - began) * 1e3, riders_of(batch)
        rows = batch.extend_num_tokens + (0 if riders is None else len(riders))
        # No bound holds for a chunk that no request waits for, and the next one may have a longer context.
        if self.waited_for:
            self._timed.append((rows, riders is not None and riders.drafted, span, host_ms))

    def rows(self, running: int) -> int:
        """Return how many rows the next step may have beside so many requests, theirs included."""
        while self._timed:
            rows, drafted, span, host_ms = self._timed[0]
            ms = span.ms if self._on_gpu else host_ms
            if ms is None:
                break
            self._timed.popleft()
            self._limit.learn(rows, ms, drafted=drafted)
        return self._agreement.share(self._limit.beside(running))


def bound_chunk(
    original: Callable[..., Prefill],
    scheduler: Scheduler,
    prefill_delayer_single_pass: object,
    running_batch: RunningBatch,
) -> Prefill:
    """Bound SGLang's next chunk while requests run: each of them has a row of it, and prompts have a page at least.

    By SGLang's own size a prompt would wait for as long as that many requests run. A prompt that has begun gets no more
    slots than the running ones leave, which have taken some since; SGLang would end the server. If there are none,
    the running ones go on alone, or are retracted.
    """
    whole, running = scheduler.chunked_prefill_size, len(running_batch.reqs)
    part = part_of(decoder_of(scheduler).parts, BoundedGaps)
    if part is not None:
        part.waited_for = running > 0
    if whole is None or not running or not (scheduler.waiting_queue or scheduler.chunked_req):
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
    """Retract the only request that runs if its next step does not fit beside a prompt that has begun.

    SGLang never retracts the last one: it would end it with an error, though the prompt's slots come free again.
    """
    running_batch.filter_batch(reqs_to_exclude=scheduler._reqs_finishing_inflight(running_batch))
    if len(running_batch.reqs) != 1 or running_batch.check_decode_mem():
        return
    [req] = running_batch.reqs
    running_batch.release_req(0, 0)
    running_batch.filter_batch(keep_indices=[])
    scheduler._add_request_to_queue(req, is_retracted=True)
