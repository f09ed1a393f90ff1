"""Handles the hooks on SGLang's own worker."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from sglang.srt.plugins.hook_registry import HookType

from sglang_dspark.engine import hooks
from sglang_dspark.engine.carried import carry_counts
from sglang_dspark.engine.hooks import Moment, check, hook
from sglang_dspark.engine.scheduler import attach_decoder, attached_decoder
from sglang_dspark.engine.sglang_types import ScheduleBatch, ServerArgs
from sglang_dspark.features.own_worker.driver import ScheduledWorker
from sglang_dspark.features.own_worker.server import scheduled
from sglang_dspark.features.own_worker.step_times import step_times
from sglang_dspark.step.device_time import AwaitedEvent

if TYPE_CHECKING:
    from sglang.srt.speculative.dspark_components.dspark_worker_v2 import DSparkWorkerV2


@hook(
    "sglang.srt.speculative.spec_info.SpeculativeAlgorithm.create_worker",
    HookType.BEFORE,
    where="children",
    reason="a scheduler process hears of its worker here first",
    by=Moment.SOME_TIME,  # called in the scheduler alone
)
def install_hooks(algorithm: object, server_args: ServerArgs) -> None:
    """Hook SGLang's own worker, in the scheduler that is about to make it."""
    scheduled(server_args).set_mode()
    hooks.install(server_args, "any_worker")


def driver_of(part: object) -> ScheduledWorker:
    """Return what drives SGLang's own worker, of the worker or of a part of it that is hooked."""
    driver = attached_decoder(part)
    assert isinstance(driver, ScheduledWorker), "SGLang's own worker is not driven yet"
    return driver


@hook(
    "sglang.srt.speculative.dspark_components.dspark_worker_v2.DSparkWorkerV2.init_cuda_graphs",
    HookType.AFTER,
    where="any_worker",
    reason="step times are measured on the worker's own steps, when its graphs are captured",
)
def start(result: None, worker: DSparkWorkerV2) -> None:
    """Take over the worker's steps, once it is ready to serve."""
    with torch.no_grad():
        driver = ScheduledWorker(worker)
        attach_decoder(driver, worker, worker._proposer, worker._verify_planner)
        driver.start(step_times(driver))
    check(Moment.READY)


@hook(
    "sglang.srt.speculative.dspark_components.dspark_worker_v2.DSparkWorkerV2._forward_decode",
    HookType.AROUND,
    where="any_worker",
    reason="the schedule decides a step before anything of it is drafted, and notes what it did",
)
def decode(
    original: Callable[..., Any], worker: DSparkWorkerV2, batch: ScheduleBatch, *args: object, **kwargs: object
) -> Any:
    """Run a decode step as the schedule decides."""
    step = partial(original, worker, batch, *args, **kwargs)
    return step() if batch.forward_mode.is_idle() else driver_of(worker).run(step, batch)


@hook(
    "sglang.srt.speculative.dspark_components.dspark_worker_v2.DSparkWorkerV2._forward_prefill",
    HookType.BEFORE,
    where="any_worker",
    reason="the time between two steps is not a step's if a prefill lies between them",
)
def before_prefill(worker: DSparkWorkerV2, *args: object, **kwargs: object) -> None:
    """Take note that what comes next is not a decode step."""
    driver_of(worker).schedule.invalidate()


@hook(
    "sglang.srt.speculative.dspark_components.dspark_draft.DraftBlockProposer.propose",
    HookType.AROUND,
    where="any_worker",
    reason="SGLang's own worker drafts in every step; its planner reads confidences that the schedule replaces",
)
def propose(
    original: Callable[..., Any], proposer: Any, *, draft_input: Any, sampling_info: Any, **given: object
) -> Any:
    """Draft, or not."""
    draft = partial(original, proposer, draft_input=draft_input, sampling_info=sampling_info, **given)
    return driver_of(proposer).step.propose(draft, draft_input.bonus_tokens, sampling_info)


@hook(
    "sglang.srt.speculative.dspark_components.dspark_planner.DSparkVerifyPlanner.schedule_layout",
    HookType.REPLACE,
    where="any_worker",
    reason="the schedule decides how many drafts of each request are verified",
)
def lay_out(planner: Any, *, prefix_lens: torch.Tensor, req_pool_indices: torch.Tensor, **given: object) -> Any:
    """Return the rows that are verified."""
    return driver_of(planner).lay_out(prefix_lens, req_pool_indices)


@hook(
    "sglang.kernels.ops.speculative.dspark.dspark_verify_window.BuildRaggedVerifyWindow.execute",
    HookType.AROUND,
    where="any_worker",
    reason="the kernel that selects drafts lays out their rows too",
    by=Moment.SOME_TIME,  # where requests verify different numbers of drafts
)
def planned_rows(original: Callable[..., Any], builder: type, *args: object, **given: Any) -> Any:
    """Return the rows of a layout: those that came with it, or what SGLang makes of it."""
    window = getattr(given.get("layout"), "window", None)
    return original(builder, *args, **given) if window is None else window


@hook(
    "sglang.srt.managers.utils.GenerationBatchResult.copy_to_cpu",
    HookType.AROUND,
    where="any_worker",
    reason="tokens, lengths and confidences of a step come to the host with one copy",
    by=Moment.SOME_TIME,  # under overlap
)
def copy_to_cpu(original: Callable[..., None], result: Any, *args: object, **kwargs: object) -> None:
    """Copy all of a step at once, before SGLang records the event that readers wait for."""
    pending = getattr(result, "dspark_copy", None)
    if pending is not None:
        # What is on the host already SGLang leaves alone.
        result.dspark_copy = copied = pending.copy()
        result.next_token_ids, *_, result.accept_lens = copied.read()
    original(result, *args, **kwargs)
    if pending is not None:
        result.copy_done = AwaitedEvent(result.copy_done)


@hook(
    "sglang.srt.managers.scheduler_components.batch_result_processor.SchedulerBatchResultProcessor._resolve_spec_v2_tokens",
    HookType.AROUND,
    where="any_worker",
    reason="there the schedule learns what became of the drafts",
)
def observe(original: Callable[..., Any], processor: Any, result: Any, batch: ScheduleBatch) -> Any:
    """Count what was verified, and learn from what SGLang reads of a result."""
    check(Moment.ANSWERED)
    record = getattr(result, "dspark_record", None)
    if record is not None:
        _, *tensors, _ = result.dspark_copy.take()  # a later copy goes to the same place
        result.dspark_record = record = record.of(tensors)
        # The answers of requests count from these, see ``request_counts``.
        carry_counts(result, record.verify_lens, record.drafted)
    predicted = original(processor, result, batch)
    if record is not None:
        driver_of(processor.model_worker).observe(result, batch.reqs)
    return predicted
