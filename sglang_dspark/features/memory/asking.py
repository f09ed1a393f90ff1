"""Ask schedulers for memory, and answer what they refuse."""

from __future__ import annotations

from typing import Any

from sglang.srt.constants import GPU_MEMORY_ALL_TYPES
from sglang.srt.plugins.hook_registry import HookType

from sglang_dspark.engine import feature
from sglang_dspark.engine.carried import only_asking, refuses
from sglang_dspark.engine.hooks import Moment, hook


@hook(
    "sglang.srt.managers.tokenizer_control_mixin.TokenizerControlMixin.release_memory_occupation",
    HookType.REPLACE,
    where="front_end",
    reason="SGLang's answer does not say that a scheduler has refused",
    by=Moment.SOME_TIME,
)
async def release(manager: Any, asked: Any, request: object = None) -> None:
    """Have all schedulers release memory.

    Raises:
        ValueError: one of them has requests, a tag is unknown, or the device has no such memory; SGLang answers HTTP
            400.
    """
    _check(manager, asked.tags)
    manager.auto_create_handle_loop()

    async def refusals(one: Any) -> list[bool]:
        return [refuses(answer) for answer in await manager.release_memory_occupation_communicator(one)]

    # Not before all are idle: what one of them has released is lost, whatever another one refuses then.
    if any(await refusals(only_asking(asked))):
        which = "no memory is released"
    elif any(refused := await refusals(asked)):
        which = f"{refused.count(False)} of {len(refused)} replicas have released memory"
        which += ", whose requests wait until it is back"
    else:
        return
    raise ValueError(
        f"{which}: requests are running; await or abort them, or pause with mode retract, and release again"
    )


@hook(
    "sglang.srt.managers.tokenizer_control_mixin.TokenizerControlMixin.resume_memory_occupation",
    HookType.REPLACE,
    where="front_end",
    reason="SGLang's answer does not say that a scheduler has refused",
    by=Moment.SOME_TIME,
)
async def resume(manager: Any, asked: Any, request: object = None) -> None:
    """Have all schedulers take memory back.

    Raises:
        ValueError: a tag is unknown, or the device has no such memory; SGLang answers HTTP 400.
    """
    _check(manager, asked.tags)
    manager.auto_create_handle_loop()
    await manager.resume_memory_occupation_communicator(asked)


def _check(manager: Any, tags: list[str] | None) -> None:
    if (device := manager.config_value("device")) not in feature.GPUS:
        raise ValueError(f"memory of the device {device} cannot be given away; serve on {' or '.join(feature.GPUS)}")
    if unknown := set(tags or ()) - set(GPU_MEMORY_ALL_TYPES):
        raise ValueError(f"tags={sorted(unknown)} is unknown; pass {', '.join(GPU_MEMORY_ALL_TYPES)}, or no tags")
