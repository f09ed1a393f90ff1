"""Several samples of one seeded request."""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING

from sglang_dspark.engine.sglang_types import TokenizerManager

if TYPE_CHECKING:
    from sglang.srt.managers.io_struct import TokenizedEmbeddingReqInput, TokenizedGenerateReqInput

_SEEDS = 2**63


def seed_each(
    manager: TokenizerManager,
    tokenized: TokenizedGenerateReqInput | TokenizedEmbeddingReqInput,
    *args: object,
    **kwargs: object,
) -> None:
    """Hook before a request goes to the scheduler: give sample k of ``n`` the seed of the request plus k.

    SGLang sends ``n`` requests that share one ``SamplingParams``, and so would draw the same text ``n`` times.
    """
    shared = getattr(tokenized, "sampling_params", None)
    if shared is not None and getattr(shared, "sampling_seed", None) is not None:
        tokenized.sampling_params = copy.copy(shared)
        shared.sampling_seed = (shared.sampling_seed + 1) % _SEEDS  # of the next one
