"""Handle the smaller hooks of the process that tokenizes; ``launch/hooks.py`` says where each stands and why."""

from __future__ import annotations

import copy
from collections.abc import AsyncIterator

from sglang.srt.managers.io_struct import GenerateReqInput, TokenizedEmbeddingReqInput, TokenizedGenerateReqInput

from sglang_dspark.engine.hook_checks import Moment, check
from sglang_dspark.engine.sglang_types import Answer, TokenizerManager

_SEEDS = 2**63


def seed_each(
    manager: TokenizerManager,
    tokenized: TokenizedGenerateReqInput | TokenizedEmbeddingReqInput,
    *args: object,
    **kwargs: object,
) -> None:
    """Give sample k of ``n`` the seed of the request plus k.

    SGLang sends ``n`` requests that share one ``SamplingParams``, and so would draw the same text ``n`` times.
    """
    shared = getattr(tokenized, "sampling_params", None)
    if shared is not None and getattr(shared, "sampling_seed", None) is not None:
        tokenized.sampling_params = copy.copy(shared)
        shared.sampling_seed = (shared.sampling_seed + 1) % _SEEDS  # of the next one


async def look_at_answers(
    answers: AsyncIterator[Answer],
    manager: TokenizerManager,
    obj: GenerateReqInput,
    state: object,
    request: object = None,
) -> AsyncIterator[Answer]:
    """Yield the answers of one request; before the last one, look for our hooks.

    A request that is aborted while it waits ends without most of what SGLang does with an answer.

    Raises:
        EngineError: see :func:`~sglang_dspark.engine.hook_checks.check`.
    """
    async for answer in answers:
        reason = (answer.get("meta_info") or {}).get("finish_reason")
        if reason is not None and reason["type"] != "abort":
            check(Moment.ANSWERED)
        yield answer
