"""Looks at the answers of a server on their way out, after which features may change them."""

from __future__ import annotations

from collections.abc import AsyncIterator

from sglang.srt.managers.io_struct import GenerateReqInput

from sglang_dspark.engine.hook_checks import Moment, check
from sglang_dspark.engine.sglang_types import Answer, TokenizerManager


async def look_at_answers(
    answers: AsyncIterator[Answer],
    manager: TokenizerManager,
    obj: GenerateReqInput,
    state: object,
    request: object = None,
) -> AsyncIterator[Answer]:
    """Yield the answers of one request; before the last one, look for our hooks. A hook.

    A request that is aborted while it waits ends without most of what SGLang does with an answer.

    Raises:
        EngineError: see :func:`~sglang_dspark.engine.hook_checks.check`.
    """
    async for answer in answers:
        reason = (answer.get("meta_info") or {}).get("finish_reason")
        if reason is not None and reason["type"] != "abort":
            check(Moment.ANSWERED)
        yield answer
