"""Handles what SGLang's scheduler does besides running batches, and finds in it what decodes.

A start is checked for what SGLang was asked to do. A failure of a step gets a line in the log that names the stage.
"""

from __future__ import annotations

import os
import signal
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from inspect import signature
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from sglang.srt.managers.io_struct import ContinueGenerationReqInput
from sglang.srt.managers.schedule_batch import Req as Request
from sglang.srt.plugins.hook_registry import HookType

from sglang_dspark.engine.batch import DSparkBatchResult
from sglang_dspark.engine.draft_input import most_rows
from sglang_dspark.engine.feature import all_features
from sglang_dspark.engine.hooks import Moment, hook
from sglang_dspark.engine.part import Part
from sglang_dspark.engine.server import tokens_per_step
from sglang_dspark.engine.sglang_types import ModelRunner, Req, ScheduleBatch, ServerArgs, TpModelWorker
from sglang_dspark.engine.support import OTHER_RELEASE, installed_sglang
from sglang_dspark.engine.target import text_model
from sglang_dspark.errors import EngineError
from sglang_dspark.scheduling.schedule import Schedule

if TYPE_CHECKING:
    from sglang.srt.managers.scheduler import Scheduler
    from sglang.srt.managers.scheduler_components.batch_result_processor import SchedulerBatchResultProcessor
    from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool

    from sglang_dspark.engine.step_control import StepControl


@dataclass(frozen=True)
class DecodeInfo:
    """Say how a server decodes.

    Attributes:
        reason: why this path was chosen.
        gamma: drafts of a block.
        cuda_graphs: whether steps are replayed from CUDA graphs.
        drafter: what is known of its checkpoint, as JSON; None if none is served.
        proposed: [V + 1] whether it proposes a token, and True; None if it proposes all.
        same_bits: whether the tokens and log-probabilities of a request are the same bits whatever else is served.
        self_check: what was compared on this GPU at the start, as JSON; None if nothing was.
    """

    reason: str
    gamma: int
    cuda_graphs: bool
    drafter: dict[str, Any] | None
    proposed: NDArray[np.bool_] | None = None
    same_bits: bool = False
    self_check: dict[str, Any] | None = None


class StepDriver(Protocol):
    """The object that answers for the decode steps of a scheduler.

    Attributes:
        server_args, target_worker: SGLang's.
        schedule: what decides the steps.
        parts: what features do with them.
        control: of the steps.
    """

    server_args: ServerArgs
    target_worker: TpModelWorker
    schedule: Schedule
    parts: Sequence[Part]
    control: StepControl

    @property
    def drafter(self) -> Any:
        """Return our worker's, with a network or without; None if another worker drafts."""

    def weights_changed(self, *, new_drafter: bool = False) -> None:
        """Follow weights that were written between two steps, in whole or in part. All ranks call it.

        Args:
            new_drafter: whether another drafter has taken the place of the one before.
        """

    def decoding(self) -> DecodeInfo:
        """Return how the server decodes, once it is ready."""


def driver_of(scheduler: Scheduler) -> StepDriver:
    """Return what answers for SGLang's scheduler."""
    driver: StepDriver = scheduler.draft_worker
    return driver


@hook(
    "sglang.srt.managers.scheduler_components.batch_result_processor.SchedulerBatchResultProcessor._resolve_spec_v2_tokens",
    HookType.AROUND,
    where="any_worker",
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
    reason="when a request has ended, its answer may be kept, and SGLang may have counted tokens after its end",
    by=Moment.SOME_TIME,
)
def end_request(result: None, processor: SchedulerBatchResultProcessor, req: Req) -> None:
    """Show the worker a request whose text is complete."""
    processor.model_worker.end_request(req)


@hook(
    "sglang.srt.managers.scheduler.Scheduler.is_fully_idle",
    HookType.BEFORE,
    where="any_worker",
    reason="another step runs while a speculating server learns from the last one that a text has ended: right after "
    "the last answer, SGLang would refuse to flush its cache, to take new weights and to release memory",
    by=Moment.SOME_TIME,
)
def take_out_ended(scheduler: Scheduler, *args: object, **kwargs: object) -> None:
    """Have the scheduler let go of requests that have ended, if there are no others.

    Under overlap another step runs while the one that ended them is looked at: until its own result is, also while
    decoding is paused, they hold memory that new weights make useless and that a release gives away.
    """
    results = scheduler.result_queue if scheduler.enable_overlap else ()
    batches = (one for batch, result in results for one in (batch, *getattr(result, "additional_batches", ())))
    known = {req for batch in batches for req in batch.reqs}
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


@hook(
    "sglang.srt.managers.scheduler.Scheduler.init_request_dispatcher",
    HookType.AFTER,
    where="any_worker",
    reason="a pause of decoding is not the time of a step; features answer requests that write weights, which the "
    "drafter follows, and that give memory away, over which SGLang may end the server",
)
def answer_requests(result: None, scheduler: Scheduler) -> None:
    """Have the end of a pause come to :func:`continue_generation`, and requests that features answer to these."""
    answer_with(scheduler, ContinueGenerationReqInput, continue_generation, scheduler)
    for feature in all_features():
        if feature.is_used(scheduler.server_args):
            feature.answers(scheduler)


def continue_generation(original: Callable[..., None], scheduler: Scheduler, asked: ContinueGenerationReqInput) -> None:
    """Decode again. It may go on without a prefill, and the pause is not the time of a step."""
    original(asked)
    driver_of(scheduler).schedule.invalidate()


def answer_with(scheduler: Any, kind: type, ours: Callable[..., Any], owner: object) -> None:
    """Have a function of ours answer the requests of a kind that come to a scheduler, which begins to listen.

    Args:
        ours: takes what answers them in SGLang, ``owner`` and the request.
    """
    answers = scheduler._request_dispatcher._mapping
    answers[kind] = partial(ours, answers[kind], owner)


_PARTS = {"decode": "decode", "_prefill": "prefill"}  # by the function of the worker
_AROUND_STAGES = ("run", "finish")  # functions of a step's executor, which call its stages
_REMEDIES = (
    (
        torch.OutOfMemoryError,
        "The device has no memory left: lower --mem-fraction-static or --max-running-requests",
    ),
    (
        torch.AcceleratorError,
        "A device reports an error later than it happens: CUDA_LAUNCH_BLOCKING=1 in the environment shows where",
    ),
)


def failure_report(error: Exception, step: int, requests: int) -> str:
    """Return the line for the log about a numbered step of so many requests."""
    remedy = next((f". {text}" for kind, text in _REMEDIES if isinstance(error, kind)), "")
    return (
        f"DSPARK: step {step} of {requests} requests failed in {failed_stage(error)} ({type(error).__name__}: {error})"
        ". Shutting down: the K/V cache may be partially written. Running requests get an error and no further token"
        f"{remedy}"
    )


def failed_stage(error: Exception) -> str:
    """Return where in a step ``error`` was raised: ``decode: verify``, or ``prefill: inject``."""
    names = [frame.f_code.co_name for frame, _ in traceback.walk_tb(error.__traceback__)]
    place = next((place for place, name in enumerate(names) if name in _PARTS), None)
    if place is None:
        return "its preparation"
    inside = [name for name in names[place + 1 :] if name not in _AROUND_STAGES]
    return ": ".join([_PARTS[names[place]], *inside[:1]])


def end_server() -> None:
    """End this node's part of the server, as a process of SGLang does when it fails. Its parent is the front end."""
    os.kill(os.getppid(), signal.SIGQUIT)


def check_start(runner: ModelRunner, window: int, *, captures: bool) -> None:
    """Refuse to serve if SGLang has not done so; pools and attention backends exist.

    Args:
        window: tokens that a step may verify per request.
        captures: whether the target has to return hidden states.

    Raises:
        EngineError: names the first thing that SGLang did not do.
    """
    for problem in _problems(runner, window, captures):
        raise EngineError(f"sglang {installed_sglang()} is not as expected: {problem}; {OTHER_RELEASE}")


def _problems(runner: ModelRunner, window: int, captures: bool) -> Iterator[str]:
    if (resolved := tokens_per_step()) != window:
        yield f"SGLang reserves for {resolved} tokens per request and step, and DSPARK verifies up to {window}"
    pool, allocator = runner.token_to_kv_pool.size, runner.token_to_kv_pool_allocator.size_full
    if pool != allocator:
        yield f"the target's K/V pool has {pool} slots and their allocator {allocator}: draft K/V would not fit"
    columns, needed = runner.req_to_token_pool.req_to_token.shape[1], runner.model_config.context_len + most_rows()
    if columns < needed:
        yield f"rows of req_to_token have {columns} columns, and a request may need {needed}"
    if list(signature(Request.update_finish_state).parameters) != ["self", "new_accepted_len"]:
        yield "Req.update_finish_state, which looks for the end of a text, takes other arguments than it did"
    if captures and not getattr(text_model(runner), "capture_aux_hidden_states", False):
        yield f"{type(runner.model).__name__} does not return the hidden states that the drafter reads"
