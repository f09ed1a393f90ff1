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
