"""Give memory away in a scheduler, and take it back: requests that come meanwhile wait."""

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

from sglang_dspark.engine.carried import only_asks, refusing
from sglang_dspark.engine.hooks import hook
from sglang_dspark.engine.scheduler import answer_with

if TYPE_CHECKING:
    from sglang.srt.managers.scheduler import Scheduler
    from sglang.srt.managers.scheduler_components.weight_updater import SchedulerWeightUpdaterManager

_PAUSED = "dspark_paused_before"


@hook(
    "sglang.srt.managers.scheduler.Scheduler.init_request_dispatcher",
    HookType.AFTER,
    where="any_worker",
    reason="SGLang ends a server that gives memory away while it has requests, or takes back what is there, and "
    "decodes requests while the memory is away",
)
def answer_requests(result: None, scheduler: Scheduler) -> None:
    """Have requests about memory, and the end of a pause, come to the functions below."""
    answer_with(scheduler, ReleaseMemoryOccupationReqInput, release, scheduler.weight_updater)
    answer_with(scheduler, ResumeMemoryOccupationReqInput, resume, scheduler.weight_updater)
    answer_with(scheduler, ContinueGenerationReqInput, go_on, scheduler)


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
        return refusing(ReleaseMemoryOccupationReqOutput())
    if only_asks(asked):
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


def go_on(original: Callable[..., None], scheduler: Scheduler, asked: ContinueGenerationReqInput) -> None:
    """Decode nothing although an operator has ended a pause, until the memory is back."""
    original(asked)
    if scheduler.weight_updater.offload_tags:
        setattr(scheduler, _PAUSED, False)
        scheduler._engine_paused = True


def _asked(asked: ReleaseMemoryOccupationReqInput | ResumeMemoryOccupationReqInput) -> set[str]:
    return set(asked.tags or GPU_MEMORY_ALL_TYPES)
