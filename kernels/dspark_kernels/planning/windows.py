"""Which rows of a flattened batch belong to which request."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Windows:
    """Each request's rows: its anchor and its verified drafts, one request after the other.

    Attributes:
        verify_lens: [bs] int, drafts verified, 0..gamma; 0 is a plain decode step.
        indptr: [bs + 1] int, first row of each request; rows from ``indptr[bs]`` on are padding.
    """

    verify_lens: torch.Tensor
    indptr: torch.Tensor


@dataclass(frozen=True)
class VerifyRows(Windows):
    """The tokens to be verified, flattened request by request, for bs request slots and a tier of N rows.

    Rows from ``indptr[bs]`` on are padding: token 0 at position 0 of K/V slot 0, of request 0, in a column beyond
    any draft, so that no row of it is ever committed. Request slots without a request have no rows.

    Attributes:
        verify_lens: [bs] int64, drafts verified.
        indptr: [bs + 1] int64, first row of each request.
        requests: [N] int64, request of each row.
        columns: [N] int64, index of each row in its request's window: 0 is the anchor; depth + 1 in padding.
        input_ids: [N] int64.
        positions: [N] int64.
        slots: [N] int64, K/V slots.
    """

    requests: torch.Tensor
    columns: torch.Tensor
    input_ids: torch.Tensor
    positions: torch.Tensor
    slots: torch.Tensor

    @staticmethod
    def empty(bs: int, num_tokens: int, device: torch.device | str) -> VerifyRows:
        """Buffers that planning fills."""
        sizes = (bs, bs + 1, *[num_tokens] * 5)
        return VerifyRows(*(torch.empty(size, dtype=torch.int64, device=device) for size in sizes))
