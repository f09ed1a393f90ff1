"""Attention callbacks of the draft backbone over the paged draft cache."""

from __future__ import annotations

import torch
from dspark_kernels import block_attention

from sglang_dspark.draft.backbone import Attend
from sglang_dspark.draft.cache import DraftCache
from sglang_dspark.draft.config import DraftConfig
from sglang_dspark.step.state import DecodeBatch


def block_attend(cache: DraftCache, step: DecodeBatch, gamma: int, config: DraftConfig) -> Attend:
    """The callback of :meth:`DraftModel.forward_block` for this step, whose blocks have ``gamma`` rows."""
    attention = block_attention(
        step.requests,
        gamma,
        heads_per_kv=config.num_attention_heads // config.num_key_value_heads,
        dtype=cache.k.dtype,
        scale=config.head_dim**-0.5,
    )

    def attend(layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return attention(q, k, v, (cache.k[layer], cache.v[layer]))

    return attend
