"""Attention callbacks of the draft backbone over the paged draft cache."""

from __future__ import annotations

import torch
from dspark_kernels.block_attention import block_attention, block_groups
from dspark_kernels.ragged_attention import attend_groups

from sglang_dspark.draft.backbone import Attend
from sglang_dspark.draft.config import DraftConfig
from sglang_dspark.worker.draft_cache import DraftCache
from sglang_dspark.worker.state import DecodeBatch


def block_attend(cache: DraftCache, req_to_token: torch.Tensor, step: DecodeBatch, config: DraftConfig) -> Attend:
    """The callback of :meth:`DraftModel.forward_block` for this step.

    Args:
        req_to_token: [rows, columns] K/V slot of every position of every request.
    """
    if step.anchors.device.type == "cpu":
        gamma = step.block_positions.shape[1] - 1
        heads_per_kv = config.num_attention_heads // config.num_key_value_heads
        table = req_to_token, step.req_pool_indices, step.prefix_lens
        groups = block_groups(*table, gamma, heads_per_kv, cache.k.dtype)

        def attend(layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
            return attend_groups(q, cache.k[layer], cache.v[layer], groups, q.shape[-1] ** -0.5, extra_kv=(k, v))

    else:

        def attend(layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
            pools = cache.k[layer], cache.v[layer]
            return block_attention(q, k, v, *pools, req_to_token, step.req_pool_indices, step.prefix_lens)

    return attend
