"""Attention in torch of blocks of query rows over paged contexts: what a CPU drafts, verifies and encodes prompts with.

SGLang's CPU backend calls the attention once per request, which costs more than the attention itself. Here requests of
similar length share a call, and everything that is the same for all layers is laid out once per step. ``tiles.py`` lays
out rows of the target, this module blocks of a drafter.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
import torch.nn.functional as F

from dspark_kernels.attention.window import PagedWindows, window_attention
from dspark_kernels.dispatch import on_kernels
from dspark_kernels.preparation import StepRequests

# Requests share a call while the shortest context has at least this share of the longest: the rest is padding.
_MIN_FILL = 0.7


@dataclass(frozen=True)
class PagedKeys:
    """Keys and values that lie in a pool and are attended side by side.

    Attributes:
        num_contexts, num_keys: C and n.
        slots: [C * n] int64 pool rows.
    """

    num_contexts: int
    num_keys: int
    slots: torch.Tensor
    _gathered: dict[tuple[int, int, torch.dtype], _Gathered] = field(default_factory=dict, repr=False, compare=False)

    def gathered(self, k_pool: torch.Tensor, v_pool: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return K and V [C, n, kv_heads, hd] of one layer, in memory that the next layer of that form uses again.

        An allocation of their size may be handed back to the system when it is freed, and then every layer would pay
        for its pages again: up to twice the time of the whole attention.
        """
        form = (k_pool.shape[1], k_pool.shape[2], k_pool.dtype)
        width = k_pool.shape[1] * k_pool.shape[2]
        if form not in self._gathered:
            assert v_pool.shape == k_pool.shape, "keys and values are gathered alike"
            shape = (self.num_contexts, self.num_keys, *k_pool.shape[1:])
            rows = [_bits(pool).new_empty(len(self.slots), width) for pool in (k_pool, v_pool)]
            self._gathered[form] = _Gathered(*rows, *(x.view(k_pool.dtype).view(shape) for x in rows))
        out = self._gathered[form]
        for pool, gathered in ((k_pool, out.k_rows), (v_pool, out.v_rows)):
            # Whole pool rows; indexing [slots, kv_heads, hd] directly takes ten times as long.
            torch.index_select(_bits(pool).view(-1, width), 0, self.slots, out=gathered)
        return out.k, out.v


class _Gathered(NamedTuple):
    """One memory in two forms: rows of numbers that torch can gather, and [C, n, kv_heads, hd] in the pool's dtype.

    The forms are made once: new views for every layer would take as long as its attention if the context is short.
    """

    k_rows: torch.Tensor
    v_rows: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor


def _bits(pool: torch.Tensor) -> torch.Tensor:
    """Return a pool as numbers that torch can gather, which it cannot do with those of eight bits."""
    return pool.view(torch.uint8) if pool.element_size() == 1 else pool


@dataclass(frozen=True)
class ContextGroup:
    """Blocks of query rows that are attended in one call, each padded to the same numbers of queries and keys.

    Attributes:
        num_blocks, num_queries: R and m.
        keys: of one context for each block, or of one that all blocks see.
        span: which of these keys are attended.
        queries: [R * m] int64 query rows, padding repeats a row; None if the group is the whole batch unpadded.
        kept: int64 indices among R * m whose outputs are no padding; None if all are.
        rows: int64 query rows of these outputs; None if the group is the whole batch, whose rows are in order.
        mask: [R or 1, 1, m * heads per K/V head, span + extra] added to the scores; None if every query sees every key.
    """

    num_blocks: int
    num_queries: int
    keys: PagedKeys
    span: slice
    queries: torch.Tensor | None
    kept: torch.Tensor | None
    rows: torch.Tensor | None
    mask: torch.Tensor | None
    _places: dict[tuple[int, int], tuple[torch.Tensor, torch.Tensor]] = field(
        default_factory=dict, repr=False, compare=False
    )

    def places(self, num_kv_heads: int, heads_per_kv: int, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
        """Return where queries are read and outputs are written, the same for all layers with so many heads.

        The heads that share a K/V head are query rows of one call: K and V are then read once and never expanded.

        Returns:
            [R * kv_heads * m] int64 among queries [N * kv_heads], each of all heads of a K/V head; and
            [rows * heads] int64 among outputs [R * m * heads per K/V head * kv_heads].
        """
        if (num_kv_heads, heads_per_kv) not in self._places:
            kv_heads, shared = (torch.arange(num, device=device) for num in (num_kv_heads, heads_per_kv))
            every = torch.arange(self.num_blocks * self.num_queries, device=device)
            rows = (every if self.queries is None else self.queries).view(self.num_blocks, 1, -1)
            kept = (every if self.kept is None else self.kept)[:, None, None]
            self._places[num_kv_heads, heads_per_kv] = (
                (rows * num_kv_heads + kv_heads[:, None]).view(-1),
                ((kept * heads_per_kv + shared) * num_kv_heads + kv_heads[:, None]).view(-1),
            )
        return self._places[num_kv_heads, heads_per_kv]


def block_groups(requests: StepRequests, rows: int, *, heads_per_kv: int, dtype: torch.dtype) -> list[ContextGroup]:
    """Lay out the attention of blocks of so many rows, which see all of their context and block, for all layers.

    Reads lengths on the host.

    Args:
        requests: of the step; a context may be empty.
        rows: of a block, whose own keys come next to those of the pool.
        heads_per_kv: query heads that share a K/V head.
        dtype: of queries; pools may have another one.
    """
    lens, device = requests.prefix_lens.tolist(), requests.prefix_lens.device
    by_length = sorted(range(len(lens)), key=lambda request: -lens[request])
    groups = []
    while by_length:
        n = lens[by_length[0]]
        size = sum(lens[request] >= _MIN_FILL * n for request in by_length)
        # In batch order, so that a group of the whole batch needs no gathering.
        members = torch.tensor(sorted(by_length[:size]), device=device)
        by_length = by_length[size:]
        # Past a request's keys comes its first one, for no weight makes a foreign NaN vanish.
        steps = torch.arange(n, device=device)
        is_key = steps < requests.prefix_lens[members][:, None]
        slots = requests.req_to_token[requests.req_pool_indices[members][:, None], torch.where(is_key, steps, 0)]
        mask = None
        if not is_key.all():
            hidden = ~F.pad(is_key, (0, rows), value=True)
            mask = torch.zeros(hidden.shape, dtype=dtype, device=device).masked_fill_(hidden, float("-inf"))
            mask = mask[:, None].repeat(1, heads_per_kv * rows, 1)[:, None]
        queries = None
        if len(members) < len(lens):
            queries = (members[:, None] * rows + torch.arange(rows, device=device)).view(-1)
        keys = PagedKeys(len(members), n, slots.to(torch.int64).view(-1))
        groups.append(ContextGroup(len(members), rows, keys, slice(0, n), queries, None, queries, mask))
    return groups


def attend_groups(
    q: torch.Tensor,  # [N, heads, hd]
    k_pool: torch.Tensor,  # [slots, kv_heads, hd]
    v_pool: torch.Tensor,  # [slots, kv_heads, hd]
    groups: Sequence[ContextGroup],
    scale: float,
    extra_kv: tuple[torch.Tensor, torch.Tensor] | None = None,
    sinks: torch.Tensor | None = None,  # [heads]
) -> torch.Tensor:
    """Compute the attention of one layer.

    Args:
        extra_kv: keys and values next to the pool, [N, kv_heads, hd] row by row with the queries.
        sinks: added to the sum of each head's weights as one more score, which ``scale`` does not touch.

    Returns:
        [N, heads, hd] in q's dtype.
    """
    out = q if groups[0].rows is None else torch.empty_like(q)
    keys, k_all, v_all = None, q, q
    for group in groups:
        if group.keys is not keys:
            keys = group.keys
            k_all, v_all = (cached.to(q.dtype) for cached in keys.gathered(k_pool, v_pool))
        k, v = k_all, v_all
        if group.span != slice(0, group.keys.num_keys) or group.num_blocks != group.keys.num_contexts:
            k, v = (x[:, group.span].expand(group.num_blocks, -1, -1, -1) for x in (k, v))
        if extra_kv is not None:
            extra_k, extra_v = (x if group.queries is None else x.index_select(0, group.queries) for x in extra_kv)
            shape = (group.num_blocks, group.num_queries, *k.shape[2:])
            k, v = torch.cat([k, extra_k.view(shape)], dim=1), torch.cat([v, extra_v.view(shape)], dim=1)
        attended = _attend(q, k, v, group, scale, sinks)
        if group.rows is None:
            return attended
        out.index_copy_(0, group.rows, attended)
    return out


def _attend(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, group: ContextGroup, scale: float, sinks: torch.Tensor | None
) -> torch.Tensor:
    """[rows, heads, hd] of one group, for q [N, heads, hd] and k and v [R, keys, kv_heads, hd]."""
    num_rows, num_heads, head_dim = q.shape
    num_kv_heads, mask = k.shape[2], group.mask
    heads_per_kv = num_heads // num_kv_heads
    read, written = group.places(num_kv_heads, heads_per_kv, q.device)
    rows = q.reshape(num_rows * num_kv_heads, heads_per_kv * head_dim).index_select(0, read)
    rows = rows.view(group.num_blocks, num_kv_heads, -1, head_dim)
    if sinks is not None:
        # A key and a value of zeros, whose score the mask gives.
        k, v = (F.pad(x, (0, 0, 0, 0, 0, 1)) for x in (k, v))
        scores = sinks.to(q.dtype).view(num_kv_heads, 1, -1).repeat(1, group.num_queries, 1).view(num_kv_heads, -1, 1)
        shape = (*rows.shape[:3], -1)
        mask = rows.new_zeros(1, 1, 1, k.shape[1] - 1) if mask is None else mask
        mask = torch.cat([mask.expand(shape), scores.expand(shape)], dim=3)
    out = F.scaled_dot_product_attention(rows, k.transpose(1, 2), v.transpose(1, 2), attn_mask=mask, scale=scale)
    return out.transpose(1, 2).reshape(-1, head_dim).index_select(0, written).view(-1, num_heads, head_dim)


Pool = tuple[torch.Tensor, torch.Tensor]

BlockAttention = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, Pool, torch.Tensor | None], torch.Tensor]
"""[bs * gamma, heads, hd] of one layer, given q, k and v of the blocks' rows, the layer's context K and V, and its
attention sinks [heads] where it has any."""


def block_windows(
    requests: StepRequests, rows: int, *, sliding_window: int | None = None, from_anchor: bool = False
) -> PagedWindows:
    """Return the layout of ``window_attention`` for blocks of so many rows. No host sync."""
    indptr = torch.arange(0, (len(requests) + 1) * rows, rows, device=requests.anchors.device)
    contexts = requests.req_to_token, requests.req_pool_indices, requests.prefix_lens
    return PagedWindows(*contexts, indptr, rows, sliding_window=sliding_window, from_anchor=from_anchor)


def block_attention_ref(
    requests: StepRequests, gamma: int, *, heads_per_kv: int, dtype: torch.dtype, scale: float
) -> BlockAttention:
    """Compute the same as :func:`block_attention` in plain torch. Reads lengths on the host."""
    groups = block_groups(requests, gamma, heads_per_kv=heads_per_kv, dtype=dtype)
    return lambda q, k, v, pool, sinks: attend_groups(q, *pool, groups, scale, extra_kv=(k, v), sinks=sinks)


@on_kernels(block_attention_ref)
def block_attention(
    requests: StepRequests, gamma: int, *, heads_per_kv: int, dtype: torch.dtype, scale: float
) -> BlockAttention:
    """Compute the attention of blocks whose rows see their context and all of the block (DSpark, Eq. 3).

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
