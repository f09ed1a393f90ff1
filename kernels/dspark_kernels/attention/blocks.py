"""Attention of whole draft blocks over their contexts, laid out once per step for all layers."""

from __future__ import annotations

from collections.abc import Callable

import torch

from dspark_kernels.attention.ragged import VisibleKeys, attend_groups, group_contexts
from dspark_kernels.attention.window import PagedWindows, window_attention
from dspark_kernels.dispatch import on_kernels
from dspark_kernels.laying_out.preparation import StepRequests

Pool = tuple[torch.Tensor, torch.Tensor]

BlockAttention = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, Pool, torch.Tensor | None], torch.Tensor]
"""[bs * gamma, heads, hd] of one layer, given q, k and v of the blocks' rows, the layer's context K and V, and its
attention sinks [heads] where it has any."""


def block_attention_ref(
    requests: StepRequests, gamma: int, *, heads_per_kv: int, dtype: torch.dtype, scale: float
) -> BlockAttention:
    """The same as :func:`block_attention` in plain torch. Reads lengths on the host."""
    groups = group_contexts(
        requests.req_to_token,
        requests.req_pool_indices.tolist(),
        requests.prefix_lens.tolist(),
        [gamma] * len(requests),
        VisibleKeys(causal=False),
        heads_per_kv=heads_per_kv,
        dtype=dtype,
        extra_keys=gamma,
    )
    return lambda q, k, v, pool, sinks: attend_groups(q, *pool, groups, scale, extra_kv=(k, v), sinks=sinks)


@on_kernels(block_attention_ref)
def block_attention(
    requests: StepRequests, gamma: int, *, heads_per_kv: int, dtype: torch.dtype, scale: float
) -> BlockAttention:
    """Attention of blocks whose rows see their context and all of the block (DSpark, Eq. 3).

    Args:
        requests: of the step.
        gamma: rows of a block.
        heads_per_kv: query heads that share a K/V head.
        dtype: of queries and pools.
        scale: of the scores.

    Returns:
        What computes a layer. On a GPU without a host sync, and safe under graph capture.
    """
    device = requests.anchors.device
    indptr = torch.arange(0, (len(requests) + 1) * gamma, gamma, device=device)
    windows = PagedWindows(requests.req_to_token, requests.req_pool_indices, requests.prefix_lens, indptr, gamma)
    return lambda q, k, v, pool, sinks: window_attention(
        q, (k, v), pool, windows, causal=False, scale=scale, sinks=sinks
    )
