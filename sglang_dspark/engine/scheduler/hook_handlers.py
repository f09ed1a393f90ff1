"""Handle what SGLang's scheduler does besides running batches."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from sglang.srt.plugins.hook_registry import HookType

from sglang_dspark.engine.compat.decoder import decoder_of
from sglang_dspark.engine.hooks import Moment, hook
from sglang_dspark.engine.scheduler.batch import DSparkBatchResult, batches_beside
from sglang_dspark.engine.sglang_types import Req, ScheduleBatch

if TYPE_CHECKING:
    from sglang.srt.managers.scheduler import Scheduler
    from sglang.srt.managers.scheduler_components.batch_result_processor import SchedulerBatchResultProcessor
    from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool


@hook(
    "sglang.srt.managers.scheduler_components.batch_result_processor.SchedulerBatchResultProcessor._resolve_spec_v2_tokens",
    HookType.AROUND,
    where="scheduler",
    reason="the result of a step comes as one tensor, which is taken apart where SGLang reads its tokens; there "
    "counters, traces and features also learn what became of its drafts",
)
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


@hook(
    "sglang.srt.managers.scheduler_components.batch_result_processor.SchedulerBatchResultProcessor._maybe_collect_routed_experts",
    HookType.AFTER,
    where="scheduler",
    reason="when a request has ended, its answer may be kept, and SGLang may have counted tokens behind its end",
    by=Moment.SOME_TIME,
)
def end_request(result: None, processor: SchedulerBatchResultProcessor, req: Req) -> None:
    """Show the worker a request whose text is complete."""
    processor.model_worker.end_request(req)


@hook(
    "sglang.srt.managers.scheduler.Scheduler.pause_generation",
    HookType.AFTER,
    where="any_worker",
    reason="decoding may go on after a pause without a prefill: the pause is not the time of a step",
    by=Moment.SOME_TIME,
)
def pause(result: None, scheduler: Scheduler, *args: object, **kwargs: object) -> None:
    """Tell the worker that no step is under way."""
    decoder_of(scheduler).schedule.invalidate()


@hook(
    "sglang.srt.managers.scheduler.Scheduler.is_fully_idle",
    HookType.BEFORE,
    where="any_worker",
    reason="a step runs beside the one in which a speculating server learns that a text has ended: right behind the "
    "last answer, SGLang would refuse to flush its cache, to take new weights and to release memory",
    by=Moment.SOME_TIME,
)
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


@hook(
    "sglang.srt.mem_cache.memory_pool.MHATokenToKVPool._init_kv_copy_and_warmup",
    HookType.REPLACE,
    where="cpu",
    reason="with a speculative algorithm the pool warms up a Triton copy kernel, which has no CPU form; DSPARK never "
    "moves K/V between slots",
    by=Moment.READY,
)
def no_kv_copy_kernel(pool: MHATokenToKVPool) -> None:
    """Leave out the kernel that copies K/V between slots."""
    pool._kv_copy_config = None


def answer_with(scheduler: Any, kind: type, ours: Callable[..., Any], owner: object) -> None:
    """Have a function of ours answer the requests of a kind that come to a scheduler, which begins to listen.

    Args:
        ours: takes what answers them in SGLang, ``owner`` and the request.
    """
    answers = scheduler._request_dispatcher._mapping
    answers[kind] = partial(ours, answers[kind], owner)
