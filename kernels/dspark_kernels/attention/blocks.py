"""Attention of whole draft blocks over their contexts, laid out once per step for all layers."""

from __future__ import annotations

from collections.abc import Callable

import torch

from dspark_kernels.attention.ragged import ContextGroup, VisibleKeys, attend_groups, group_contexts
from dspark_kernels.attention.window import PagedWindows, window_attention
from dspark_kernels.dispatch import on_kernels
from dspark_kernels.planning.preparation import StepRequests

Pool = tuple[torch.Tensor, torch.Tensor]

BlockAttention = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, Pool, torch.Tensor | None], torch.Tensor]
"""[bs * gamma, heads, hd] of one layer, given q, k and v of the blocks' rows, the layer's context K and V, and its
attention sinks [heads] where it has any."""


def block_groups(requests: StepRequests, rows: int, *, heads_per_kv: int, dtype: torch.dtype) -> list[ContextGroup]:
    """The layout of ``attend_groups`` for blocks of so many rows, which see all of their context and of their block.

    Reads lengths on the host.
    """
    return group_contexts(
        requests.req_to_token,
        requests.req_pool_indices.tolist(),
        requests.prefix_lens.tolist(),
        [rows] * len(requests),
        VisibleKeys(causal=False),
        heads_per_kv=heads_per_kv,
        dtype=dtype,
        extra_keys=rows,
    )


def block_windows(
    requests: StepRequests, rows: int, *, sliding_window: int | None = None, from_anchor: bool = False
) -> PagedWindows:
    """The layout of ``window_attention`` for blocks of so many rows. No host sync."""
    indptr = torch.arange(0, (len(requests) + 1) * rows, rows, device=requests.anchors.device)
    contexts = requests.req_to_token, requests.req_pool_indices, requests.prefix_lens
    return PagedWindows(*contexts, indptr, rows, sliding_window=sliding_window, from_anchor=from_anchor)


def block_attention_ref(
    requests: StepRequests, gamma: int, *, heads_per_kv: int, dtype: torch.dtype, scale: float
) -> BlockAttention:
    """The same as :func:`block_attention` in plain torch. Reads lengths on the host."""
    groups = block_groups(requests, gamma, heads_per_kv=heads_per_kv, dtype=dtype)
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
    windows = block_windows(requests, gamma)
    return lambda q, k, v, pool, sinks: window_attention(
        q, (k, v), pool, windows, causal=False, scale=scale, sinks=sinks
    )
