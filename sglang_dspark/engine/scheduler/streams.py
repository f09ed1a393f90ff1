"""When a stream is due, where a step brings several tokens."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


def when_due(original: Callable[..., None], outputs: Any, *, req: Any) -> None:
    """Hook around SGLang's choice of what is streamed now, so that ``stream_interval`` means what it does without us.

    A plain server streams after 1, 1 + i, 1 + 2i tokens and so on. SGLang asks whether the text has one of these
    lengths just now; a step of several tokens goes past most of them.

    Args:
        outputs: SGLang's collection of what is sent to the detokenizer.
        req: a ``Req``; its ``send_token_offset`` tokens were sent already.
    """
    parameters = req.sampling_params
    interval = parameters.stream_interval or outputs.default_stream_interval
    if not req.stream or interval <= 1 or req.finished():
        original(outputs, req=req)
        return
    if (len(req.output_ids) - 1) // interval == (req.send_token_offset - 1) // interval:
        return
    given = parameters.stream_interval
    parameters.stream_interval = 1
    try:
        original(outputs, req=req)
    finally:
        parameters.stream_interval = given
