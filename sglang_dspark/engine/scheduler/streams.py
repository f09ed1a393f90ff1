"""When a stream is due, where a step brings several tokens."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from sglang.srt.runtime_context import get_serving


def when_due(original: Callable[..., None], streamer: Any, reqs: Sequence[Any], *args: Any, **kwargs: Any) -> None:
    """Hook around what SGLang streams after a step, so that ``stream_interval`` means what it does without us.

    A plain server streams after 1, 1 + i, 1 + 2i tokens and so on. SGLang counts from what was sent last, and where a
    step brings several tokens it would come later from message to message.

    Args:
        reqs: the step's ``Req``; ``send_token_offset`` tokens of one were sent already.
    """
    default = int(get_serving().stream_interval)
    spaced = [
        req
        for req in reqs
        if req.stream and (req.sampling_params.stream_interval or default) > 1 and not req.finished()
    ]
    if not spaced:
        original(streamer, reqs, *args, **kwargs)
        return
    due = [req for req in spaced if _is_due(req, default)]
    waiting = {id(req) for req in spaced} - {id(req) for req in due}
    with _streamed_now(due):
        original(streamer, [req for req in reqs if id(req) not in waiting], *args, **kwargs)


def _is_due(req: Any, default: int) -> bool:
    interval = req.sampling_params.stream_interval or default
    return (len(req.output_ids) - 1) // interval != (req.send_token_offset - 1) // interval


@contextmanager
def _streamed_now(reqs: Sequence[Any]) -> Iterator[None]:
    """Have SGLang find every text of ``reqs`` due, whatever its length."""
    given = [req.sampling_params.stream_interval for req in reqs]
    for req in reqs:
        req.sampling_params.stream_interval = 1
    try:
        yield
    finally:
        for req, interval in zip(reqs, given, strict=True):
            req.sampling_params.stream_interval = interval
