"""Attention in torch of a target's rows over paged contexts, with the same bits however many rows are computed at once.

A product of matrices sums in an order that follows from its shape. So each tile of positions has as many keys as its
place in the context says, padded with keys of zero weight. Then the bits of a row follow from its query, its keys and
values only: not from the rows that are verified with it, from other requests, or from where a prompt was cut. Once
there are a few query rows, their number does not matter: they are padded to a multiple of four. PyTorch promises none
of this: ``engine.same_bits`` tries it when a server starts.

SGLang's CPU backend pads the queries of an extend to the whole context, which makes eight verify rows cost as much as a
prompt.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from math import gcd
from typing import NamedTuple

import torch

from dspark_kernels.attention.ragged import AttentionLayout, ContextGroup, LayoutBuilder

TILE_ROWS = 64
"""Positions of a tile, which begins at a multiple of that."""

_MULTIPLE = 4
"""Query rows of a call, counted for each head that shares a K/V head, are a multiple of it."""

_PADDING = 4
"""Keys are padded by at most about one in so many, so that requests with similar contexts share a call."""


class VisibleKeys(NamedTuple):
    """The keys of the pool that a row sees: up to its own one.

    Attributes:
        sliding_window: the most keys that a row sees, its own among them; None for all of them.
        translation: [slots] int64, row of the pool for each slot of a key that is seen; None if they are the same.
    """

    sliding_window: int | None = None
    translation: torch.Tensor | None = None


class _Part(NamedTuple):
    """The rows of a request in one tile.

    Attributes:
        end: position after the tile.
        first, num_keys: positions of the keys; they follow from the tile.
        begin, rows: positions that are computed, real ones and padding.
    """

    end: int
    first: int
    num_keys: int
    begin: int
    rows: int


class _Request(NamedTuple):
    """A request's row in the table, and its new positions ``first`` to ``last - 1``, ``start`` in the batch."""

    row: int
    first: int
    last: int
    start: int

    def parts(self, sliding_window: int | None, heads_per_kv: int) -> list[_Part]:
        parts, multiple = [], _MULTIPLE // gcd(_MULTIPLE, heads_per_kv)
        for begin in range(self.first // TILE_ROWS * TILE_ROWS, self.last, TILE_ROWS):
            end = begin + TILE_ROWS
            first, keys = 0, _padded(end)
            if sliding_window is not None:
                first = max(0, begin - -(-(sliding_window - 1) // TILE_ROWS) * TILE_ROWS)
                keys = end - first
            real = max(begin, self.first), min(end, self.last)
            rows = -(-(real[1] - real[0]) // multiple) * multiple
            parts.append(_Part(end, first, keys, min(real[0], end - rows), rows))
        return parts

    def rows_of(self, parts: Sequence[_Part]) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the rows in the batch of what parts of as many rows compute, and which of them are real."""
        begins = torch.tensor([part.begin for part in parts])
        positions = (begins[:, None] + torch.arange(parts[0].rows)).view(-1)
        of_rows = positions.clamp(self.first, self.last - 1)
        return of_rows - self.first + self.start, of_rows == positions


def _padded(keys: int) -> int:
    step = max(TILE_ROWS, (1 << keys.bit_length() - 1) // _PADDING)
    return -(-keys // step) * step


def tile_contexts(
    req_to_token: torch.Tensor,  # [rows, columns] int
    requests: Sequence[int],
    key_lens: Sequence[int],
    query_lens: Sequence[int],
    visible: VisibleKeys,
    *,
    heads_per_kv: int,
    dtype: torch.dtype,
) -> AttentionLayout:
    """Lay out the attention of a verification or of prompts, for all layers of a kind.

    Args:
        req_to_token: pool row of every position of every request.
        requests: row of each request in that table.
        key_lens: keys of each request in the pool: its first positions, up to its last query.
        query_lens: query rows of each request, back to back in the batch; 0 for some of them is allowed.
        visible: which of these keys a query sees.
        heads_per_kv: query heads that share a K/V head.
        dtype: of queries; pools may have another one.

    Returns:
        What ``attend_groups`` computes.
    """
    masks = _masks(max(key_lens), heads_per_kv, visible.sliding_window, dtype)
    builder, single = LayoutBuilder(), dict[int, list[tuple[_Request, _Part]]]()
    starts = accumulate(query_lens, initial=0)
    for row, keys, queries, start in zip(requests, key_lens, query_lens, starts, strict=False):
        if queries == 0:
            continue
        request = _Request(row, keys - queries, keys, start)
        parts = request.parts(visible.sliding_window, heads_per_kv)
        if len(parts) == 1:
            single.setdefault(parts[0].num_keys, []).append((request, parts[0]))
        else:
            _add_one(builder, req_to_token, request, parts, visible, masks)
    for members in single.values():
        _add_many(builder, req_to_token, members, visible, masks)
    return builder.layout()


def _add_one(
    builder: LayoutBuilder,
    req_to_token: torch.Tensor,
    request: _Request,
    parts: Sequence[_Part],
    visible: VisibleKeys,
    masks: _Masks,
) -> None:
    """Add the calls for a request whose rows are in several tiles; its keys are gathered once."""
    first, last = parts[0].first, max(part.first + part.num_keys for part in parts)
    gathered = builder.keys(_slots(req_to_token, request, first, last - first, visible))
    alike: dict[tuple[int, ...], list[_Part]] = {}
    for part in reversed(parts):
        alike.setdefault((part.first, part.num_keys, part.rows, part.end - part.begin), []).append(part)
    for (begin, num_keys, rows, _), members in alike.items():
        group = ContextGroup(len(members), rows, gathered + begin - first, 1, num_keys, masks.of(members))
        builder.call(group, *request.rows_of(members))


def _add_many(
    builder: LayoutBuilder,
    req_to_token: torch.Tensor,
    members: Sequence[tuple[_Request, _Part]],
    visible: VisibleKeys,
    masks: _Masks,
) -> None:
    """Add the call for requests with as many keys, each of which has rows in one tile."""
    num_keys, rows = members[0][1].num_keys, max(part.rows for _, part in members)
    members = [(request, part._replace(begin=min(part.begin, part.end - rows), rows=rows)) for request, part in members]
    slots = [_slots(req_to_token, request, part.first, num_keys, visible) for request, part in members]
    queries, real = map(torch.cat, zip(*(request.rows_of([part]) for request, part in members), strict=True))
    mask = torch.cat([masks.of([part]) for _, part in members])
    group = ContextGroup(len(members), rows, builder.keys(torch.cat(slots)), len(members), num_keys, mask)
    builder.call(group, queries, real)


def _slots(
    req_to_token: torch.Tensor, request: _Request, first: int, num_keys: int, visible: VisibleKeys
) -> torch.Tensor:
    """Return [num_keys] int64 pool rows of the positions from ``first`` on.

    Keys that no row sees may have lost their place in the pool, or hold a foreign NaN, which no weight makes vanish:
    one that is seen takes their place.
    """
    window = visible.sliding_window
    oldest = 0 if window is None else max(0, request.first - window + 1)
    positions = torch.arange(first, first + num_keys).clamp(oldest, request.last - 1)
    slots = req_to_token[request.row, positions].to(torch.int64)
    return slots if visible.translation is None else visible.translation[slots]


class _Masks(NamedTuple):
    """What the rows of tiles see, of all tiles in one memory.

    Attributes:
        rows: [TILE_ROWS * heads per K/V head, columns], 0 or -inf.
        end: the column after a tile's last row; the keys of a tile begin as many columns before it as positions.
    """

    rows: torch.Tensor
    end: int

    def of(self, parts: Sequence[_Part]) -> torch.Tensor:
        """Return [parts, 1, rows * heads per K/V head, keys]; a view.

        Args:
            parts: of the same rows in their tiles and the same keys; of tiles in a row, the last one first.
        """
        part, (row, _) = parts[0], self.rows.stride()
        heads_per_kv = len(self.rows) // TILE_ROWS
        begin = (part.begin - part.end + TILE_ROWS) * heads_per_kv * row + self.end - (part.end - part.first)
        shape = len(parts), 1, part.rows * heads_per_kv, part.num_keys
        return self.rows.as_strided(shape, (TILE_ROWS, 0, row, 1), begin)


_largest: dict[tuple[int, int | None, torch.dtype], _Masks] = {}
"""By heads per K/V head, window and dtype."""


def _masks(longest: int, heads_per_kv: int, sliding_window: int | None, dtype: torch.dtype) -> _Masks:
    """Return the masks of tiles of requests with so many keys, in memory that is kept for later ones."""
    needed = 2 * TILE_ROWS + (longest if sliding_window is None else min(longest, sliding_window))
    kind = heads_per_kv, sliding_window, dtype
    if kind not in _largest or _largest[kind].end < needed:
        end = 1 << needed.bit_length()
        keys = torch.arange(-end, max(TILE_ROWS, end // _PADDING))
        rows = torch.arange(-TILE_ROWS, 0)[:, None]
        hidden = keys > rows
        if sliding_window is not None:
            hidden |= keys <= rows - sliding_window
        seen = torch.zeros(hidden.shape, dtype=dtype).masked_fill_(hidden, float("-inf"))
        _largest[kind] = _Masks(seen.repeat_interleave(heads_per_kv, dim=0), end)
    return _largest[kind]
