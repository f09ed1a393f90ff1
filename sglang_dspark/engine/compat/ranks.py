"""The group of the ranks: an attribute of the model runner once, now of the process."""

from __future__ import annotations

from typing import Any

import sglang.srt.runtime_context as runtime_context


def tp_group(runner: Any) -> Any:
    """SGLang's ``GroupCoordinator`` of the target's ranks."""
    return runner.tp_group if hasattr(runner, "tp_group") else runtime_context.get_parallel().tp_group


def tp_size(runner: Any) -> int:
    """How many these are."""
    return int(tp_group(runner).world_size)
