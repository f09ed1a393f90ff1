"""Handle the smaller hooks of the process that tokenizes; ``launch/hooks.py`` says where each stands and why."""

from __future__ import annotations

import copy

from sglang.srt.managers.io_struct import TokenizedEmbeddingReqInput, TokenizedGenerateReqInput
from sglang.srt.plugins.hook_registry import HookType

from sglang_dspark.engine.hooks import Moment, hook
from sglang_dspark.engine.sglang_types import TokenizerManager

_SEEDS = 2**63


@hook(
    "sglang.srt.managers.tokenizer_manager.TokenizerManager._send_one_request",
    HookType.BEFORE,
    where="front_end",
    reason="SGLang sends the n samples of a request with one seed; seeds are served here, so all would have one text",
    by=Moment.SOME_TIME,
)
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
