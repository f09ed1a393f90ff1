"""Write weights in a scheduler, and follow what SGLang writes."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import torch
from sglang.srt.constants import GPU_MEMORY_TYPE_WEIGHTS
from sglang.srt.managers import io_struct
from sglang.srt.managers.io_struct import UpdateWeightFromDiskReqInput, UpdateWeightFromDiskReqOutput
from sglang.srt.plugins.hook_registry import HookType

from sglang_dspark.engine.hooks import Moment, hook
from sglang_dspark.engine.part import part_of
from sglang_dspark.engine.scheduler import Decoder, answer_with, decoder_of
from sglang_dspark.errors import ConfigError, DSparkError
from sglang_dspark.features.weights.served import DRAFTER, Weights

logger = logging.getLogger(__name__)

_WRITES = (
    io_struct.BeginWeightUpdateReqInput,
    io_struct.UpdateWeightFromDiskReqInput,
    io_struct.UpdateWeightsFromTensorReqInput,
    io_struct.UpdateWeightsFromDistributedReqInput,
    io_struct.UpdateWeightsFromIPCReqInput,
    io_struct.EndWeightUpdateReqInput,
)
"""Requests that write weights."""
_MEETING = ("BeginWeightUpdate", "UpdateWeightsFromTensor", "UpdateWeightsFromIPC", "EndWeightUpdate")
"""Requests at whose end all ranks wait for each other."""
_AWAY = ConfigError(
    'the memory of the weights is released: take it back first, POST /resume_memory_occupation {"tags": ["weights"]}'
)


def weights_of(decoder: Decoder) -> Weights:
    """Return the part of SGLang's scheduler that writes weights."""
    weights = part_of(decoder.parts, Weights)
    assert weights is not None, "weights of every server can be written"
    return weights


@hook(
    "sglang.srt.managers.scheduler.Scheduler.init_request_dispatcher",
    HookType.AFTER,
    where="any_worker",
    reason="what the drafter reads of the target follows, what was learned is forgotten, and weights that do not fit "
    "are refused, where SGLang would end the server",
)
def answer_writes(result: None, scheduler: Any) -> None:
    """Have requests that write weights come to :func:`write`."""
    for kind in _WRITES:
        answer_with(scheduler, kind, write, scheduler.weight_updater)


def write(original: Callable[[Any], Any], manager: Any, request: Any) -> Any:
    """Have SGLang write weights between two steps, or a drafter's checkpoint, and follow them.

    Of weights that come in parts, the last one is followed. If some do not fit, the request is at fault and not the
    server: it says so and serves what it has. The drafter's are written once all ranks have those of the target, and
    on all ranks or on none. Into memory that is released nothing is written: a GPU would fault.
    """
    name = type(request).__name__
    if GPU_MEMORY_TYPE_WEIGHTS in manager.offload_tags:
        return _failed(name, _AWAY)
    decoder = decoder_of(manager.scheduler)
    weights = weights_of(decoder)
    weights.transient = name.startswith("UpdateWeightsFromIPC")
    loads_drafter = isinstance(request, UpdateWeightFromDiskReqInput) and request.load_format == DRAFTER
    torch.get_device_module(manager.tp_worker.device).synchronize()  # a step that was launched reads the old ones
    try:
        answer = _replace_drafter(decoder, manager, request) if loads_drafter else original(request)
    except Exception as error:  # noqa: BLE001 - SGLang's loaders raise whatever they meet
        answer = _failed(name, error)
        if name.startswith(_MEETING):
            torch.distributed.barrier(group=manager.tp_cpu_group)
    answer, drafted = _agreed(answer, manager.tp_cpu_group), weights.drafted()
    if drafted and answer.success:
        try:
            weights.write_drafter(drafted)
        except Exception as error:  # noqa: BLE001 - whatever comes of writing into memory
            answer = _failed(name, error)
        answer = _agreed(answer, manager.tp_cpu_group)
    if manager._session is None:
        weights.follow()
    if not answer.success or name.startswith("Update"):
        weights.note(None if answer.success else answer.message)
    return answer


@hook(
    "sglang.srt.managers.scheduler_components.weight_updater.SchedulerWeightUpdaterManager._select_runners",
    HookType.AROUND,
    where="any_worker",
    reason="SGLang's drafters have the names of their target's tensors, so it writes those into both",
    by=Moment.SOME_TIME,
)
def select(original: Callable[..., Any], manager: Any, selector: str = "all") -> Any:
    """Return the runners of the target, whatever else is asked for, or of the drafter if it alone is named.

    What is for both is told apart by its names.
    """
    if selector != "draft":
        return original(manager, "target" if selector == "all" else selector)
    decoder = decoder_of(manager.scheduler)
    return weights_of(decoder).runners if decoder.drafter is not None else original(manager, selector)


def _replace_drafter(decoder: Decoder, manager: Any, request: Any) -> Any:
    """Put another checkpoint in the place of the drafter's weights, on all ranks or on none."""
    answer = UpdateWeightFromDiskReqOutput(success=True, message="The drafter was replaced.")
    try:
        put = weights_of(decoder).load_drafter(request.model_path)
    except Exception as error:  # noqa: BLE001 - a damaged file, or a device whose memory is full
        _log(error)
        answer = UpdateWeightFromDiskReqOutput(success=False, message=f"{error}; the drafter that served serves on")
    answer = _agreed(answer, manager.tp_cpu_group)
    if not answer.success:
        return answer
    put()
    manager.record_weight_version_after_update(request.weight_version)
    if request.flush_cache and not manager.flush_cache(empty_cache=request.torch_empty_cache):
        answer.message += (
            " Requests are running, so K/V of the old one stays in the cache, with which drafts are worse: call "
            "/flush_cache when the server is idle."
        )
    return answer


def _failed(request: str, error: Exception) -> Any:
    """Return what SGLang answers to a request of this class that failed."""
    _log(error)
    message = str(error)
    if not isinstance(error, DSparkError):
        message = (
            f"new weights could not be written ({type(error).__name__}: {error}). The server goes on with what it has, "
            "which may be new in part: send weights that fit this model, all of them"
        )
    return getattr(io_struct, request.replace("ReqInput", "ReqOutput"))(success=False, message=message)


def _log(error: Exception) -> None:
    """Write an error into the log: with its traceback, if it is not one of ours, which says all."""
    logger.error("DSPARK: weights that do not fit: %s", error, exc_info=not isinstance(error, DSparkError))


def _agreed(answer: Any, ranks: Any) -> Any:
    """Return the answer of the first rank that failed; SGLang would answer for rank 0 alone."""
    if torch.distributed.get_world_size(group=ranks) == 1:
        return answer
    answers: list[Any] = [None] * torch.distributed.get_world_size(group=ranks)
    torch.distributed.all_gather_object(answers, answer, group=ranks)
    return next((one for one in answers if not one.success), answer)
