"""Attention callbacks of the draft backbone over the paged draft cache."""

from __future__ import annotations

import torch
from dspark_kernels.block_attention import block_attention
from dspark_kernels.ragged_attention import few_query_attention, slot_index

from sglang_dspark.draft.backbone import Attend
from sglang_dspark.worker.draft_cache import DraftCache
from sglang_dspark.worker.state import DecodeBatch


def block_attend(cache: DraftCache, req_to_token: torch.Tensor, step: DecodeBatch, gamma: int) -> Attend:
    """The callback of :meth:`DraftModel.forward_block` for this step.

    Args:
        req_to_token: [rows, columns] K/V slot of every position of every request.
        gamma: rows per request.
    """
    if step.anchors.device.type == "cpu":
        return _cpu_attend(cache, req_to_token, step, gamma)

    def attend(layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        pools = cache.k[layer], cache.v[layer]
        return block_attention(q, k, v, *pools, req_to_token, step.req_pool_indices, step.prefix_lens)

    return attend


def _cpu_attend(cache: DraftCache, req_to_token: torch.Tensor, step: DecodeBatch, gamma: int) -> Attend:
    # As block_attention_ref, with the slots of a request looked up once for all layers.
    contexts = [
        slot_index(req_to_token[request, :prefix].to(torch.int64))
        for request, prefix in zip(step.req_pool_indices.tolist(), step.prefix_lens.tolist(), strict=True)
    ]

    def attend(layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        out = torch.empty_like(q)
        scale = q.shape[-1] ** -0.5
        for index, context in enumerate(contexts):
            block = slice(index * gamma, (index + 1) * gamma)
            keys = torch.cat([cache.k[layer][context], k[block]])
            values = torch.cat([cache.v[layer][context], v[block]])
            out[block] = few_query_attention(q[block], keys, values, scale=scale, causal=False)
        return out

    return attend
