"""Rows of requests in recurrent layers: where the state before them lies, and how many of them are replayed."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class StateRows:
    """Ragged rows that run through a recurrent layer, each request from the state in its slot.

    Attributes:
        indptr: [bs + 1] int, first row of each request; rows from ``indptr[bs]`` on are padding.
        slots: [bs] int, slots of a layer's pool. A request with a slot below 0 starts from zeros, and stores nothing.
    """

    indptr: torch.Tensor
    slots: torch.Tensor

    def with_rows(self) -> list[tuple[int, int, int]]:
        """Return first row, end and slot of each request that has rows, on the host."""
        columns = self.indptr[:-1].tolist(), self.indptr[1:].tolist(), self.slots.tolist()
        return [(first, end, slot) for first, end, slot in zip(*columns, strict=True) if first < end]


@dataclass(frozen=True)
class ReplayedRows(StateRows):
    """The rows that a commit runs again: of each request those that were accepted.

    Attributes:
        lengths: [bs] int, the anchor and the accepted drafts; at most the rows that the request has. Below 1 its state
            stays as it is.
        track_lengths: [bs] int, rows after which the state goes to a second slot as well, as a cached prefix needs it;
            below 1 and above ``lengths`` none is stored. None: for no request.
        track_slots: [bs] int, these second slots; below 0 none is stored.
    """

    lengths: torch.Tensor
    track_lengths: torch.Tensor | None = None
    track_slots: torch.Tensor | None = None

    def replays(self) -> list[tuple[int, int, int, dict[int, int]]]:
        """Return first row, length, slot and ``{length: track slot}`` of requests that store a state, on the host."""
        given = [part for part in (self.track_lengths, self.track_slots) if part is not None]
        tracks = given or [torch.full_like(self.slots, -1)] * 2
        lengths = torch.minimum(self.lengths, self.indptr.diff())
        columns = (self.indptr[:-1], lengths, self.slots, *tracks)
        return [
            (first, length, slot, {after: track} if track >= 0 else {})
            for first, length, slot, after, track in zip(*(column.tolist() for column in columns), strict=True)
            if slot >= 0 and length > 0
        ]
