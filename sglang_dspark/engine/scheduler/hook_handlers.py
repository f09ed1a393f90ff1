"""Handle the smaller hooks of the scheduler process; ``launch/hooks.py`` says where each stands and why."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from sglang_dspark.engine.compat.decoder import decoder_of
from sglang_dspark.engine.scheduler.batch import DSparkBatchResult, batches_beside
from sglang_dspark.engine.sglang_types import Req, ScheduleBatch

if TYPE_CHECKING:
    from sglang.srt.managers.scheduler import Scheduler
    from sglang.srt.managers.scheduler_components.batch_result_processor import SchedulerBatchResultProcessor
    from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool


def observe_results(
    original: Callable[..., Sequence[Sequence[int]]],
    processor: SchedulerBatchResultProcessor,
    result: DSparkBatchResult,
    batch: ScheduleBatch,
) -> Sequence[Sequence[int]]:
    """Unpack a step's result before SGLang reads its tokens, and show it to the worker afterwards."""
    result.read_copy()
    predicted = original(processor, result, batch)
    for part in processor.model_worker.parts:
        part.tokens_come(batch, result, predicted)
    processor.model_worker.observe(result, batch)
    return predicted


def end_request(result: None, processor: SchedulerBatchResultProcessor, req: Req) -> None:
    """Show the worker a request whose text is complete."""
    processor.model_worker.end_request(req)


def pause(result: None, scheduler: Scheduler, *args: object, **kwargs: object) -> None:
    """Tell the worker that no step is under way."""
    decoder_of(scheduler).schedule.invalidate()


def take_out_ended(scheduler: Scheduler, *args: object, **kwargs: object) -> None:
    """Have the scheduler let go of requests that have ended, if there are no others.

    Under overlap a step runs beside the one that ended them: until its result is looked at, also while decoding is
    paused, they hold memory that new weights make useless and that a release gives away.
    """
    results = scheduler.result_queue if scheduler.enable_overlap else ()
    known = {req for batch, result in results for one in (batch, *batches_beside(result)) for req in one.reqs}
    running, last = scheduler.running_batch, scheduler.last_batch
    left = {*running.reqs, *(last.reqs if last else ())}
    if scheduler.chunked_req or not all(req.finished() or (req.to_finish and req in known) for req in left):
        return
    while results:
        scheduler.process_batch_result(*results.popleft())
    running.filter_batch()
    running.batch_is_full = False
    scheduler.last_batch = None


def no_kv_copy_kernel(pool: MHATokenToKVPool) -> None:
    """Leave out the kernel that copies K/V between slots."""
    pool._kv_copy_config = None
