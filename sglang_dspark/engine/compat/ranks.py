"""Which rank this is, and the group of its ranks: attributes of the model runner once, now of the process."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import sglang.srt.runtime_context as runtime_context


def tp_rank(given: Mapping[str, Any]) -> int:
    """Rank within the tensor-parallel group.

    Args:
        given: what SGLang passes to the constructor of a worker: the rank, an object that has it, or neither.
    """
    if "tp_rank" in given:
        return int(given["tp_rank"])
    return int(given["ps"].tp_rank if "ps" in given else runtime_context.get_parallel().tp_rank)


def tp_group(runner: Any) -> Any:
    """SGLang's ``GroupCoordinator`` of the target's ranks."""
    return runner.tp_group if hasattr(runner, "tp_group") else runtime_context.get_parallel().tp_group


def tp_size(runner: Any) -> int:
    """How many these are."""
    return int(tp_group(runner).world_size)
