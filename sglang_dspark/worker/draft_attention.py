"""Attention of the block rows: over the request's context in the draft pool and, without a mask, over its own block."""

from __future__ import annotations

import torch
from dspark_kernels.ragged_attention import few_query_attention, slot_index

from sglang_dspark.draft.backbone import Attend
from sglang_dspark.worker.draft_cache import DraftCache
from sglang_dspark.worker.state import DecodeBatch


def reference_attend(cache: DraftCache, req_to_token: torch.Tensor, decode: DecodeBatch, gamma: int) -> Attend:
    """The callback of :meth:`DraftModel.forward_block` in plain torch; reads lengths on the host, so it is for the CPU.

    Args:
        req_to_token: [rows, columns] K/V slot of every position of every request.
    """
    contexts = [
        slot_index(req_to_token[request, :prefix].to(torch.int64))
        for request, prefix in zip(decode.req_pool_indices.tolist(), decode.prefix_lens.tolist(), strict=True)
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
