"""Attention callbacks of the draft backbone over the paged draft cache."""

from __future__ import annotations

import torch
from dspark_kernels.block_attention import attend_contexts, block_attention, context_slots

from sglang_dspark.draft.backbone import Attend
from sglang_dspark.worker.draft_cache import DraftCache
from sglang_dspark.worker.state import DecodeBatch


def block_attend(cache: DraftCache, req_to_token: torch.Tensor, step: DecodeBatch) -> Attend:
    """The callback of :meth:`DraftModel.forward_block` for this step.

    Args:
        req_to_token: [rows, columns] K/V slot of every position of every request.
    """
    if step.anchors.device.type == "cpu":
        contexts = context_slots(req_to_token, step.req_pool_indices, step.prefix_lens)

        def attend(layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
            return attend_contexts(q, k, v, cache.k[layer], cache.v[layer], contexts)

    else:

        def attend(layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
            pools = cache.k[layer], cache.v[layer]
            return block_attention(q, k, v, *pools, req_to_token, step.req_pool_indices, step.prefix_lens)

    return attend
