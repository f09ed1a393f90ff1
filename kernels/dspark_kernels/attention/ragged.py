"""Attention in torch of a few query rows per request over paged contexts: what a CPU drafts and verifies with.

SGLang's CPU backend pads the queries of an extend to the full context, which makes eight verify rows cost as much as a
whole prefill, and it calls the attention once per request, which costs more than the attention itself. Here requests of
similar length share a call, and everything that is the same for all layers is laid out once per step.
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
class ContextGroup:
    """Requests that are attended in one call, their queries and keys padded to the longest.

    Attributes:
        num_requests, num_queries, num_keys: R, m and n after padding; n counts keys from the pool that a query sees.
        slots: [R * n] int64 pool rows of the keys.
        queries: [R * m] int64 query rows, padding repeats a row; None if the group is the whole batch unpadded.
        kept: int64 indices among R * m whose outputs are no padding; None with ``queries``.
        rows: int64 query rows of these indices; None if the group is the whole batch, whose rows are in order.
        mask: [R, 1, heads per K/V head * m, n + extra] added to the scores; None if every query sees every key.
    """

    num_requests: int
    num_queries: int
    num_keys: int
    slots: torch.Tensor
    queries: torch.Tensor | None
    kept: torch.Tensor | None
    rows: torch.Tensor | None
    mask: torch.Tensor | None
    _gathered: dict[tuple[int, int, torch.dtype], _Gathered] = field(default_factory=dict, repr=False, compare=False)

    def gathered(self, k_pool: torch.Tensor, v_pool: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return K and V [R, n, kv_heads, hd] of one layer, in memory that the next layer of that form uses again.

        An allocation of their size may be handed back to the system when it is freed, and then every layer would pay
        for its pages again: up to twice the time of the whole attention.
        """
        form = (k_pool.shape[1], k_pool.shape[2], k_pool.dtype)
        width = k_pool.shape[1] * k_pool.shape[2]
        if form not in self._gathered:
            assert v_pool.shape == k_pool.shape, "keys and values are gathered alike"
            shape = (self.num_requests, self.num_keys, *k_pool.shape[1:])
            rows = [_bits(pool).new_empty(len(self.slots), width) for pool in (k_pool, v_pool)]
            self._gathered[form] = _Gathered(*rows, *(x.view(k_pool.dtype).view(shape) for x in rows))
        out = self._gathered[form]
        for pool, gathered in ((k_pool, out.k_rows), (v_pool, out.v_rows)):
            # Whole pool rows; indexing [slots, kv_heads, hd] directly takes ten times as long.
            torch.index_select(_bits(pool).view(-1, width), 0, self.slots, out=gathered)
        return out.k, out.v


class _Gathered(NamedTuple):
    """One memory in two forms: rows of numbers that torch can gather, and [R, n, kv_heads, hd] in the pool's dtype.

    The forms are made once: new views for every layer would take as long as its attention if the context is short.
    """

    k_rows: torch.Tensor
    v_rows: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor


def _bits(pool: torch.Tensor) -> torch.Tensor:
    """Return a pool as numbers that torch can gather, which it cannot do with those of eight bits."""
    return pool.view(torch.uint8) if pool.element_size() == 1 else pool


class VisibleKeys(NamedTuple):
    """The keys of the pool that a query sees.

    Attributes:
        causal: queries are the last positions among the keys and see no later key; otherwise all see all.
        sliding_window: the most keys that a query sees, its own among them, with ``causal``; None for all of them.
        translation: [slots] int64, row of the pool for each slot of a key that is seen; None if they are the same.
    """

    causal: bool
    sliding_window: int | None = None
    translation: torch.Tensor | None = None

    def first_seen(self, keys: int, queries: int) -> int:
        """Return the oldest of ``keys`` keys that the first of the last ``queries`` ones sees."""
        return 0 if self.sliding_window is None else max(0, keys - queries - self.sliding_window + 1)


def group_contexts(
    req_to_token: torch.Tensor,  # [rows, columns] int
    rows: Sequence[int],
    key_lens: Sequence[int],
    query_lens: Sequence[int],
    visible: VisibleKeys,
    *,
    heads_per_kv: int,
    dtype: torch.dtype,
    extra_keys: int = 0,
) -> list[ContextGroup]:
    """Lay out the attention of a step, for all layers of a kind.

    Args:
        req_to_token: pool row of every position of every request.
        rows: row of each request in that table.
        key_lens: keys of each request in the pool: its first positions; 0 is allowed.
        query_lens: query rows of each request, back to back in the batch.
        visible: which of these keys a query sees.
        heads_per_kv: query heads that share a K/V head.
        dtype: of queries; pools may have another one.
        extra_keys: keys per request next to the pool, which all its queries see.
    """
    starts = torch.tensor([0, *query_lens]).cumsum(0).tolist()
    firsts = [visible.first_seen(*lens) for lens in zip(key_lens, query_lens, strict=True)]
    key_lens = [keys - first for keys, first in zip(key_lens, firsts, strict=True)]
    by_length = sorted(range(len(rows)), key=lambda request: -key_lens[request])
    groups, device = [], req_to_token.device
    while by_length:
        longest = key_lens[by_length[0]]
        size = sum(key_lens[request] >= _MIN_FILL * longest for request in by_length)
        # In batch order, so that a group of the whole batch needs no gathering.
        members = sorted(by_length[:size])
        by_length = by_length[size:]
        keys = torch.tensor([key_lens[request] for request in members])
        queries = torch.tensor([query_lens[request] for request in members])
        n, m = int(keys.max()), int(queries.max())
        steps = torch.arange(m)
        padded = len(members) < len(rows) or bool((queries < m).any())
        first = torch.tensor([starts[request] for request in members])
        rows_of_queries = (first[:, None] + torch.minimum(steps, queries[:, None] - 1)).view(-1)
        kept = (steps < queries[:, None]).view(-1).nonzero().squeeze(1) if padded else None
        groups.append(
            ContextGroup(
                num_requests=len(members),
                num_queries=m,
                num_keys=n,
                slots=_slots(
                    req_to_token,
                    torch.tensor([rows[request] for request in members]),
                    torch.tensor([firsts[request] for request in members]),
                    keys,
                    n,
                    visible.translation,
                ),
                # The lengths are the host's, and so is what follows only from them.
                queries=_on(device, rows_of_queries if padded else None),
                kept=_on(device, kept),
                rows=_on(device, rows_of_queries[kept] if kept is not None and len(members) < len(rows) else None),
                mask=_on(device, _mask(keys, queries, n, m, visible, heads_per_kv, extra_keys, dtype)),
            )
        )
    return groups


def _on(device: torch.device, part: torch.Tensor | None) -> torch.Tensor | None:
    return None if part is None else part.to(device)


def _slots(
    req_to_token: torch.Tensor,
    rows: torch.Tensor,  # [R]
    firsts: torch.Tensor,  # [R] position of the first key
    keys: torch.Tensor,  # [R]
    n: int,
    translation: torch.Tensor | None,
) -> torch.Tensor:
    """[R * n] pool rows; past a request's keys its first one, for no weight makes a foreign NaN vanish."""
    steps = torch.arange(n)
    positions = firsts[:, None] + torch.where(steps < keys[:, None], steps, 0)
    slots = req_to_token[rows[:, None], positions].to(torch.int64).view(-1)
    return slots if translation is None else translation[slots]


def _mask(
    keys: torch.Tensor,  # [R]
    queries: torch.Tensor,  # [R]
    n: int,
    m: int,
    visible: VisibleKeys,
    heads_per_kv: int,
    extra_keys: int,
    dtype: torch.dtype,
) -> torch.Tensor | None:
    causal, sliding_window, _ = visible
    # Of a single row, the keys are those of its window.
    if bool((keys == n).all()) and (m == 1 or not causal):
        return None
    # Query i of a request with k keys and q queries stands at position k - q + i. Padded queries see all its keys.
    last = keys[:, None] - 1
    if causal:
        last = torch.minimum(last, (keys - queries)[:, None] + torch.arange(m))
    hidden = torch.arange(n) > last[..., None]  # [R, m or 1, n]
    if sliding_window is not None:
        hidden |= torch.arange(n) <= last[..., None] - sliding_window
    mask = torch.zeros(hidden.shape, dtype=dtype).masked_fill_(hidden, float("-inf"))
    mask = F.pad(mask, (0, extra_keys)).expand(-1, m, -1)
    return mask.repeat(1, heads_per_kv, 1)[:, None]


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
    out = torch.empty_like(q) if len(groups) > 1 else q
    for group in groups:
        picked = q if group.queries is None else q.index_select(0, group.queries)
        k, v = (cached.to(q.dtype) for cached in group.gathered(k_pool, v_pool))
        if extra_kv is not None:
            extra_k, extra_v = (x if group.queries is None else x.index_select(0, group.queries) for x in extra_kv)
            shape = (group.num_requests, group.num_queries, *k.shape[2:])
            k, v = torch.cat([k, extra_k.view(shape)], dim=1), torch.cat([v, extra_v.view(shape)], dim=1)
        attended = _attend(picked, k, v, group, scale, sinks)
        if group.kept is not None:
            attended = attended.index_select(0, group.kept)
        if group.rows is None:
            return attended
        out.index_copy_(0, group.rows, attended)
    return out


def _attend(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, group: ContextGroup, scale: float, sinks: torch.Tensor | None
) -> torch.Tensor:
    """[R * m, heads, hd] of one group: k and v are [R, keys, kv_heads, hd]."""
    _, num_heads, head_dim = q.shape
    num_kv_heads, mask = k.shape[2], group.mask
    # The heads that share a K/V head become extra query rows: K and V are then read once and never expanded.
    by_kv_head = (group.num_requests, num_kv_heads, -1, head_dim)
    if group.num_queries == 1:
        rows = q.view(by_kv_head)
    else:
        grouped = q.view(group.num_requests, group.num_queries, num_kv_heads, -1, head_dim).permute(0, 2, 3, 1, 4)
        rows = grouped.reshape(by_kv_head)
    if sinks is not None:
        # A key and a value of zeros, whose score the mask gives.
        k, v = (F.pad(x, (0, 0, 0, 0, 0, 1)) for x in (k, v))
        scores = sinks.to(q.dtype).view(num_kv_heads, -1).repeat_interleave(group.num_queries, dim=1)[..., None]
        shape = (*rows.shape[:3], -1)
        mask = rows.new_zeros(1, 1, 1, k.shape[1] - 1) if mask is None else mask
        mask = torch.cat([mask.expand(shape), scores.expand(shape)], dim=3)
    out = F.scaled_dot_product_attention(rows, k.transpose(1, 2), v.transpose(1, 2), attn_mask=mask, scale=scale)
    if group.num_queries == 1:
        return out.reshape(-1, num_heads, head_dim)
    out = out.view(group.num_requests, num_kv_heads, -1, group.num_queries, head_dim)
    return out.permute(0, 3, 1, 2, 4).reshape(-1, num_heads, head_dim)


Pool = tuple[torch.Tensor, torch.Tensor]

BlockAttention = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, Pool, torch.Tensor | None], torch.Tensor]
"""[bs * gamma, heads, hd] of one layer, given q, k and v of the blocks' rows, the layer's context K and V, and its
attention sinks [heads] where it has any."""


def block_groups(requests: StepRequests, rows: int, *, heads_per_kv: int, dtype: torch.dtype) -> list[ContextGroup]:
    """Return the layout of ``attend_groups`` for blocks of so many rows, which see all of their context and block.

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
