"""Attention in torch of blocks of query rows over paged contexts: what a CPU drafts, verifies and encodes prompts with.

SGLang's CPU backend calls the attention once per request, which costs more than the attention itself. Here requests of
similar length share a call, keys and queries of all calls are gathered at once, and everything that is the same for all
layers is laid out once per step. ``tiles.py`` lays out rows of the target, this module blocks of a drafter.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
import torch.nn.functional as F

from dspark_kernels.preparation import StepRequests

# Requests share a call while the shortest context has at least this share of the longest: the rest is padding.
_MIN_FILL = 0.7


class ContextGroup(NamedTuple):
    """Blocks of query rows that are attended in one call, each padded to the same numbers of queries and keys.

    Attributes:
        num_blocks, num_queries: R and m.
        first: of the group's keys among all that are gathered.
        num_contexts, num_keys: C and n: a context for each block, or one for all of them.
        mask: [R or 1, 1, m * heads per K/V head, n + extra] added to the scores; None if every query sees every key.
    """

    num_blocks: int
    num_queries: int
    first: int
    num_contexts: int
    num_keys: int
    mask: torch.Tensor | None


@dataclass(frozen=True)
class AttentionLayout:
    """What the attention of a step reads and writes, the same for all layers that see the same.

    Attributes:
        groups: the calls.
        slots: [keys] int64 pool rows of the keys of all groups.
        queries: [Q] int64 query rows that are computed, group by group; padding repeats a row.
        outputs: [N] int64, where among them each query row is computed.
    """

    groups: Sequence[ContextGroup]
    slots: torch.Tensor
    queries: torch.Tensor
    outputs: torch.Tensor
    _places: dict[tuple[int, int], tuple[torch.Tensor, torch.Tensor]] = field(
        default_factory=dict, repr=False, compare=False
    )
    _gathered: dict[tuple[int, int, torch.dtype], tuple[list[torch.Tensor], list[list[torch.Tensor]]]] = field(
        default_factory=dict, repr=False, compare=False
    )

    def places(self, num_kv_heads: int, heads_per_kv: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return where queries are read and outputs are found, the same for all layers with so many heads.

        The heads that share a K/V head are query rows of one call: K and V are then read once and never expanded.

        Returns:
            [Q * kv_heads] int64 among queries [N * kv_heads], each of all heads of a K/V head; and
            [N * heads] int64 among outputs [Q * heads per K/V head * kv_heads].
        """
        if (num_kv_heads, heads_per_kv) not in self._places:
            device = self.queries.device
            kv_heads, shared = (torch.arange(num, device=device) for num in (num_kv_heads, heads_per_kv))
            blocks = self.queries.split([group.num_blocks * group.num_queries for group in self.groups])
            read = [
                (rows.view(group.num_blocks, 1, -1) * num_kv_heads + kv_heads[:, None]).view(-1)
                for group, rows in zip(self.groups, blocks, strict=True)
            ]
            found = (self.outputs[:, None, None] * heads_per_kv + shared) * num_kv_heads + kv_heads[:, None]
            self._places[num_kv_heads, heads_per_kv] = torch.cat(read), found.view(-1)
        return self._places[num_kv_heads, heads_per_kv]

    def gathered(self, pools: tuple[torch.Tensor, torch.Tensor], dtype: torch.dtype) -> list[list[torch.Tensor]]:
        """Return K and V [R, kv_heads, n, hd] of one layer for each group.

        They lie in memory that the next layer of that form uses again. An allocation of their size may be handed back
        to the system when it is freed, and then every layer would pay for its pages again: up to twice the time of the
        whole attention. New views for every layer would take as long as the attention if the context is short.
        """
        (_, num_kv_heads, head_dim), stored = pools[0].shape, pools[0].dtype
        form = num_kv_heads, head_dim, stored
        if form not in self._gathered:
            assert pools[0].shape == pools[1].shape, "keys and values are gathered alike"
            rows = [_bits(pool).new_empty(len(self.slots), num_kv_heads * head_dim) for pool in pools]
            kv = [x.view(stored).view(-1, num_kv_heads, head_dim) for x in rows]
            self._gathered[form] = rows, self._contexts(kv)
        # K and V [keys, kv_heads * hd] as numbers that torch can gather, and the same as the calls read it.
        rows, contexts = self._gathered[form]
        for pool, out in zip(pools, rows, strict=True):
            # Whole pool rows; indexing [slots, kv_heads, hd] directly takes ten times as long.
            torch.index_select(_bits(pool).view(len(pool), -1), 0, self.slots, out=out)
        if stored == dtype:
            return contexts
        return self._contexts([x.view(stored).to(dtype).view(-1, num_kv_heads, head_dim) for x in rows])

    def _contexts(self, kv: Sequence[torch.Tensor]) -> list[list[torch.Tensor]]:
        """Return views of K and V [keys, kv_heads, hd], for each group."""
        found = []
        for group in self.groups:
            keys = slice(group.first, group.first + group.num_contexts * group.num_keys)
            shape = group.num_contexts, group.num_keys, *kv[0].shape[1:]
            found.append([x[keys].view(shape).expand(group.num_blocks, -1, -1, -1).transpose(1, 2) for x in kv])
        return found


def _bits(pool: torch.Tensor) -> torch.Tensor:
    """Return a pool as numbers that torch can gather, which it cannot do with those of eight bits."""
    return pool.view(torch.uint8) if pool.element_size() == 1 else pool


class LayoutBuilder:
    """Collects the calls of a layout."""

    def __init__(self) -> None:
        self._groups: list[ContextGroup] = []
        self._slots: list[torch.Tensor] = []
        self._num_slots = 0
        self._queries: list[torch.Tensor] = []
        self._real: list[torch.Tensor] = []

    def keys(self, slots: torch.Tensor) -> int:
        """Have these pool rows gathered; returns the first key's place."""
        self._slots.append(slots)
        self._num_slots += len(slots)
        return self._num_slots - len(slots)

    def call(self, group: ContextGroup, queries: torch.Tensor, real: torch.Tensor) -> None:
        """Add a call for [R * m] int64 query rows, of which some may be padding."""
        self._groups.append(group)
        self._queries.append(queries)
        self._real.append(real)

    def layout(self) -> AttentionLayout:
        """Return all calls; every query row is real in one of them."""
        queries = torch.cat(self._queries)
        places = torch.cat(self._real).nonzero().squeeze(1)
        outputs = torch.empty_like(places).index_copy_(0, queries[places], places)
        return AttentionLayout(self._groups, torch.cat(self._slots), queries, outputs)


def block_groups(
    requests: StepRequests,
    rows: int,
    *,
    heads_per_kv: int,
    dtype: torch.dtype,
    sees: Callable[[torch.Tensor, int], torch.Tensor] | None = None,
) -> AttentionLayout:
    """Lay out the attention of blocks of so many rows next to the pool, for all layers that see the same.

    Reads lengths on the host.

    Args:
        requests: of the step; a context may be empty.
        rows: of a block, whose own keys come next to those of the pool.
        heads_per_kv: query heads that share a K/V head.
        dtype: of queries; pools may have another one.
        sees: what rows see of n keys of contexts of these lengths [R], and of their block: [R, rows, n + rows] bool;
            None for all of it.
    """
    lens, device = requests.prefix_lens.tolist(), requests.prefix_lens.device
    by_length = sorted(range(len(lens)), key=lambda request: -lens[request])
    builder = LayoutBuilder()
    while by_length:
        n = lens[by_length[0]]
        size = sum(lens[request] >= _MIN_FILL * n for request in by_length)
        members = torch.tensor(sorted(by_length[:size]), device=device)
        by_length = by_length[size:]
        # Past a request's keys comes its first one, for no weight makes a foreign NaN vanish.
        steps, own_lens = torch.arange(n, device=device), requests.prefix_lens[members]
        is_key = steps < own_lens[:, None]
        slots = requests.req_to_token[requests.req_pool_indices[members][:, None], torch.where(is_key, steps, 0)]
        mask, seen = None, F.pad(is_key, (0, rows), value=True)[:, None].expand(-1, rows, -1)
        if sees is not None:
            seen = sees(own_lens, n)
        if not seen.all():
            mask = torch.zeros(seen.shape, dtype=dtype, device=device).masked_fill_(~seen, float("-inf"))
            mask = mask.repeat_interleave(heads_per_kv, dim=1)[:, None]
        queries = (members[:, None] * rows + torch.arange(rows, device=device)).view(-1)
        first = builder.keys(slots.to(torch.int64).view(-1))
        group = ContextGroup(len(members), rows, first, len(members), n, mask)
        builder.call(group, queries, torch.ones_like(queries, dtype=torch.bool))
    return builder.layout()


def attend_groups(
    q: torch.Tensor,  # [N, heads, hd]
    k_pool: torch.Tensor,  # [slots, kv_heads, hd]
    v_pool: torch.Tensor,  # [slots, kv_heads, hd]
    layout: AttentionLayout,
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
    num_rows, num_heads, head_dim = q.shape
    num_kv_heads = k_pool.shape[1]
    heads_per_kv = num_heads // num_kv_heads
    read, found = layout.places(num_kv_heads, heads_per_kv)
    rows = q.reshape(num_rows * num_kv_heads, heads_per_kv * head_dim).index_select(0, read)
    extra = None if extra_kv is None else [x.index_select(0, layout.queries) for x in extra_kv]
    outputs, begin = [], 0
    for group, context in zip(layout.groups, layout.gathered((k_pool, v_pool), q.dtype), strict=True):
        end = begin + group.num_blocks * group.num_queries
        queries = rows[begin * num_kv_heads : end * num_kv_heads].view(group.num_blocks, num_kv_heads, -1, head_dim)
        kv = context
        if extra is not None:
            shape = group.num_blocks, group.num_queries, num_kv_heads, head_dim
            own = (x[begin:end].view(shape).transpose(1, 2) for x in extra)
            kv = [torch.cat(both, dim=2) for both in zip(context, own, strict=True)]
        outputs.append(_attend(queries, kv, group, scale, sinks))
        begin = end
    computed = outputs[0] if len(outputs) == 1 else torch.cat(outputs)
    return computed.index_select(0, found).view(-1, num_heads, head_dim)


def _attend(
    rows: torch.Tensor,  # [R, kv_heads, m * heads per K/V head, hd]
    kv: Sequence[torch.Tensor],  # twice [R, kv_heads, keys, hd]
    group: ContextGroup,
    scale: float,
    sinks: torch.Tensor | None,
) -> torch.Tensor:
    """[R * m * heads per K/V head * kv_heads, hd] of one group."""
    mask, (k, v) = group.mask, kv
    if sinks is not None:
        # A key and a value of zeros, whose score the mask gives.
        k, v = (F.pad(x, (0, 0, 0, 1)) for x in (k, v))
        num_kv_heads, shape = k.shape[1], (*rows.shape[:3], -1)
        scores = (
            sinks.to(rows.dtype).view(num_kv_heads, 1, -1).repeat(1, group.num_queries, 1).view(num_kv_heads, -1, 1)
        )
        mask = rows.new_zeros(1, 1, 1, k.shape[2] - 1) if mask is None else mask
        mask = torch.cat([mask.expand(shape), scores.expand(shape)], dim=3)
    out = F.scaled_dot_product_attention(rows, k, v, attn_mask=mask, scale=scale)
    return out.transpose(1, 2).reshape(-1, rows.shape[3])
