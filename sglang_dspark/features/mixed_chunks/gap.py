"""Bound chunks beside running requests: above by the time that these may wait, below so that prompts go on."""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

import torch
from sglang.srt.plugins.hook_registry import HookType

from sglang_dspark.config import flag_name
from sglang_dspark.engine.agreement import Agreement
from sglang_dspark.engine.batch import riders_of
from sglang_dspark.engine.draft_input import spare_slots
from sglang_dspark.engine.hooks import hook
from sglang_dspark.engine.part import Part, Worker, part_of
from sglang_dspark.engine.scheduler import decoder_of
from sglang_dspark.engine.sglang_types import ScheduleBatch
from sglang_dspark.scheduling.policies import LEAST_ROWS, ChunkLimit, least_gap_ms
from sglang_dspark.scheduling.schedule import Schedule
from sglang_dspark.step.packed import DeviceSpan, DeviceTimer

if TYPE_CHECKING:
    from sglang.srt.managers.schedule_batch import ScheduleBatch as RunningBatch
    from sglang.srt.managers.scheduler import Scheduler

    Prefill = tuple[RunningBatch | None, RunningBatch]

logger = logging.getLogger(__name__)


class BoundedGaps(Part):
    """Time the steps that encode prompts, and say how many rows the next one may have.

    Args:
        bound_ms: of a step.
        agreement: of the ranks: chunks are as long on all of them.
        device: of the target.
        schedule: returns the server's, which is made after the parts.
        page_size: of the target's K/V: a chunk has a page at least.

    Attributes:
        waited_for: whether requests run while the next chunk is encoded.
    """

    def __init__(
        self,
        bound_ms: float,
        agreement: Agreement,
        device: torch.device,
        schedule: Callable[[], Schedule],
        page_size: int,
    ) -> None:
        self._bound_ms, self._schedule, self._least_rows = bound_ms, schedule, max(LEAST_ROWS, page_size)
        self._limit, self._agreement = ChunkLimit(bound_ms), agreement
        self._timer, self._on_gpu = DeviceTimer(device), device.type == "cuda"
        self._began: tuple[DeviceSpan, float] | None = None
        self.waited_for = False
        self._timed: deque[tuple[int, bool, DeviceSpan, float]] = deque(maxlen=2)  # spans that may still be read

    @classmethod
    def of(cls, worker: Worker) -> BoundedGaps | None:
        """Return the part of a worker; None without a bound."""
        bound_ms = worker.options.max_gap_ms
        if bound_ms is None:
            return None
        page_size = worker.server_args.page_size or 1
        return cls(bound_ms, worker.agreement, worker.device, lambda: worker.schedule, page_size)

    def ready(self) -> None:
        """Say in the log which gaps can be kept."""
        flag, least_ms = f"{flag_name('max_gap_ms')}={self._bound_ms:g}", self._least_ms()
        if least_ms is None:
            logger.info("DSPARK: %s: which gaps can be kept is not known without step times", flag)
        elif least_ms <= self._bound_ms:
            logger.info("DSPARK: %s can be kept: the shortest step beside a prompt takes %.1f ms", flag, least_ms)
        else:
            logger.warning(
                "DSPARK: %s cannot be kept on this machine: the shortest step beside a prompt, of %d of its tokens and "
                "one running request, takes %.1f ms; chunks are that short, and %.1f is the least bound that is kept",
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
        """Return the milliseconds of the shortest step beside a prompt; None if step times are not known."""
        times = self._schedule().times
        return None if times is None else least_gap_ms(times, self._least_rows)

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
            ms = self._agreement.share(span.ms if self._on_gpu else host_ms)
            if ms is None:
                break
            self._timed.popleft()
            self._limit.learn(rows, ms, drafted=drafted)
        return self._limit.beside(running)


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
    part = part_of(decoder_of(scheduler).parts, BoundedGaps)
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
    """Retract the only request that runs if its next step does not fit beside a prompt that has begun.

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
