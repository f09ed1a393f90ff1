"""Memory of the device that a server gives away for a while and takes back: weights, K/V and graphs.

Requests that come meanwhile wait.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import msgspec
from sglang.srt.constants import GPU_MEMORY_ALL_TYPES
from sglang.srt.managers.io_struct import (
    ContinueGenerationReqInput,
    ReleaseMemoryOccupationReqInput,
    ReleaseMemoryOccupationReqOutput,
    ResumeMemoryOccupationReqInput,
    ResumeMemoryOccupationReqOutput,
)
from sglang.srt.plugins.hook_registry import HookType

from sglang_dspark.engine import feature
from sglang_dspark.engine.feature import Feature, FlagRule, off_gpu
from sglang_dspark.engine.hooks import Moment, hook
from sglang_dspark.engine.scheduler import answer_with

if TYPE_CHECKING:
    from sglang.srt.managers.scheduler import Scheduler
    from sglang.srt.managers.scheduler_components.weight_updater import SchedulerWeightUpdaterManager


ONLY_ASKS = "dspark-release-nothing"
"""The id, which SGLang leaves empty, of a request that only asks whether there are requests."""
REFUSED = "requests are running"
"""The id of a scheduler's answer that it has not released memory."""


@hook(
    "sglang.srt.managers.tokenizer_control_mixin.TokenizerControlMixin.release_memory_occupation",
    HookType.REPLACE,
    where="front_end",
    reason="SGLang's answer does not say that a scheduler has refused",
    by=Moment.SOME_TIME,
)
async def ask_to_release(manager: Any, asked: Any, request: object = None) -> None:
    """Have all schedulers release memory.

    Raises:
        ValueError: one of them has requests, a tag is unknown, or the device has no such memory; SGLang answers HTTP
            400.
    """
    _check_tags(manager, asked.tags)
    manager.auto_create_handle_loop()

    async def refusals(one: Any) -> list[bool]:
        return [answer.rid == REFUSED for answer in await manager.release_memory_occupation_communicator(one)]

    # Not before all are idle: what one of them has released is lost, whatever another one refuses then.
    if any(await refusals(msgspec.structs.replace(asked, rid=ONLY_ASKS))):
        which = "no memory is released"
    elif any(refused := await refusals(asked)):
        which = f"{refused.count(False)} of {len(refused)} replicas have released memory"
        which += ", and their requests wait until it is resumed"
    else:
        return
    raise ValueError(
        f"{which}: requests are running; wait for them, abort them, or pause with mode retract, and release again"
    )


@hook(
    "sglang.srt.managers.tokenizer_control_mixin.TokenizerControlMixin.resume_memory_occupation",
    HookType.REPLACE,
    where="front_end",
    reason="SGLang's answer does not say that a scheduler has refused",
    by=Moment.SOME_TIME,
)
async def ask_to_resume(manager: Any, asked: Any, request: object = None) -> None:
    """Have all schedulers take memory back.

    Raises:
        ValueError: a tag is unknown, or the device has no such memory; SGLang answers HTTP 400.
    """
    _check_tags(manager, asked.tags)
    manager.auto_create_handle_loop()
    await manager.resume_memory_occupation_communicator(asked)


def _check_tags(manager: Any, tags: list[str] | None) -> None:
    if (device := manager.config_value("device")) not in feature.GPUS:
        raise ValueError(f"this server runs on {device}, and only memory of a GPU can be released or resumed")
    if unknown := set(tags or ()) - set(GPU_MEMORY_ALL_TYPES):
        raise ValueError(f"tags={sorted(unknown)} is unknown; pass {', '.join(GPU_MEMORY_ALL_TYPES)}, or no tags")


_PAUSED = "dspark_paused_before"


def answer_requests(scheduler: Scheduler) -> None:
    """Have requests about memory, and the end of a pause, come to the functions below.

    SGLang ends a server that gives memory away while it has requests, or takes back what is there, and decodes requests
    while the memory is away.
    """
    answer_with(scheduler, ReleaseMemoryOccupationReqInput, release, scheduler.weight_updater)
    answer_with(scheduler, ResumeMemoryOccupationReqInput, resume, scheduler.weight_updater)
    answer_with(scheduler, ContinueGenerationReqInput, stay_paused, scheduler)


def release(
    original: Callable[..., ReleaseMemoryOccupationReqOutput],
    manager: SchedulerWeightUpdaterManager,
    asked: ReleaseMemoryOccupationReqInput,
) -> ReleaseMemoryOccupationReqOutput:
    """Release memory of a scheduler without a running request, and decode nothing until all of it is back.

    What is released already stays so.
    """
    scheduler: Any = manager.scheduler
    tags = _asked(asked) - manager.offload_tags
    if not tags:
        return ReleaseMemoryOccupationReqOutput()
    if not manager.is_fully_idle(ignore_waiting=scheduler._engine_paused):
        return ReleaseMemoryOccupationReqOutput(rid=REFUSED)
    if asked.rid == ONLY_ASKS:
        return ReleaseMemoryOccupationReqOutput()
    if not manager.offload_tags:
        setattr(scheduler, _PAUSED, scheduler._engine_paused)
    answer = original(msgspec.structs.replace(asked, tags=sorted(tags)))
    scheduler._engine_paused = True
    return answer


def resume(
    original: Callable[..., ResumeMemoryOccupationReqOutput],
    manager: SchedulerWeightUpdaterManager,
    asked: ResumeMemoryOccupationReqInput,
) -> ResumeMemoryOccupationReqOutput:
    """Take memory back that was released, and decode again when all of it is there."""
    tags = _asked(asked) & manager.offload_tags
    if not tags:
        return ResumeMemoryOccupationReqOutput()
    answer = original(msgspec.structs.replace(asked, tags=sorted(tags)))
    if not manager.offload_tags:
        scheduler: Any = manager.scheduler
        scheduler._engine_paused = getattr(scheduler, _PAUSED)
    return answer


def stay_paused(original: Callable[..., None], scheduler: Scheduler, asked: ContinueGenerationReqInput) -> None:
    """Decode nothing although an operator has ended a pause, until the memory is back."""
    original(asked)
    if scheduler.weight_updater.offload_tags:
        setattr(scheduler, _PAUSED, False)
        scheduler._engine_paused = True


def _asked(asked: ReleaseMemoryOccupationReqInput | ResumeMemoryOccupationReqInput) -> set[str]:
    return set(asked.tags or GPU_MEMORY_ALL_TYPES)


FEATURE = Feature(
    __name__,
    is_used=lambda args: True,
    flag_rules=(
        FlagRule(
            "enable_memory_saver",
            (False,),
            "drop the flag: SGLang can release only memory of GPUs",
            applies=off_gpu,
        ),
    ),
    answers=answer_requests,
)
