"""Handle the smaller hooks of the scheduler process; ``launch/hooks.py`` says where each stands and why."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from sglang_dspark.engine.compat.decoder import decoder_of


def nothing_to_refuse(req: Any, enable_overlap: bool) -> None:
    """Let every request pass: what DSPARK cannot serve was refused before it was tokenized."""


def observe_results(original: Callable[..., Any], processor: Any, result: Any, batch: Any) -> Any:
    """Unpack a step's result before SGLang reads its tokens, and show it to the worker afterwards."""
    result.read_copy()
    predicted = original(processor, result, batch)
    for part in processor.model_worker.parts:
        part.tokens_come(batch, result, predicted)
    processor.model_worker.observe(result, batch)
    return predicted


def end_request(result: None, processor: Any, req: Any) -> None:
    """Show the worker a request whose text is complete."""
    processor.model_worker.end_request(req)


def pause(result: None, scheduler: Any, *args: Any, **kwargs: Any) -> None:
    """Tell the worker that no step is under way."""
    decoder_of(scheduler).schedule.invalidate()


def no_kv_copy_kernel(pool: Any) -> None:
    """Leave out the kernel that copies K/V between slots."""
    pool._kv_copy_config = None
