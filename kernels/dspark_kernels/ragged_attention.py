"""Attention of a few query rows per request over a long paged context: what drafting and verification need on a CPU.

SGLang's CPU backend pads the queries of an extend to the full context, which makes eight verify rows cost as much as a
whole prefill: quadratic instead of linear in the context length.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

SlotIndex = torch.Tensor | slice


def slot_index(slots: torch.Tensor) -> SlotIndex:
    """Index for pool rows ``slots`` [n] int64: a slice where they are consecutive, so that reading copies nothing."""
    if slots.shape[0] > 0 and bool((slots[1:] - slots[:-1] == 1).all()):
        first = int(slots[0])
        return slice(first, first + slots.shape[0])
    return slots


def few_query_attention(
    q: torch.Tensor,  # [m, heads, hd]
    k: torch.Tensor,  # [n, kv_heads, hd]
    v: torch.Tensor,  # [n, kv_heads, hd]
    *,
    scale: float,
    causal: bool,
) -> torch.Tensor:
    """Attention of ``m`` query rows of one request over its ``n >= m`` keys.

    Args:
        causal: the queries are the last ``m`` of the ``n`` positions and see no later key; otherwise all see all keys.

    Returns:
        [m, heads, hd] in q's dtype.
    """
    num_queries, num_heads, head_dim = q.shape
    num_keys, num_kv_heads, _ = k.shape
    group = num_heads // num_kv_heads
    mask = None
    if causal and num_queries > 1:
        last_visible = torch.arange(num_keys - num_queries, num_keys, device=q.device)
        mask = (torch.arange(num_keys, device=q.device) <= last_visible[:, None]).repeat(group, 1)
    # The heads that share a K/V head become extra query rows: K and V are then read once and never expanded.
    rows = q.view(num_queries, num_kv_heads, group, head_dim).permute(1, 2, 0, 3).reshape(1, num_kv_heads, -1, head_dim)
    out = F.scaled_dot_product_attention(
        rows, k.transpose(0, 1)[None], v.transpose(0, 1)[None], attn_mask=mask, scale=scale
    )
    return out.view(num_kv_heads, group, num_queries, head_dim).permute(2, 0, 1, 3).reshape(num_queries, num_heads, -1)
