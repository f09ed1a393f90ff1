"""Layouts of rows in memory."""

from __future__ import annotations

import torch


def with_whole_rows(x: torch.Tensor) -> torch.Tensor:
    """``x`` [n, heads, hd] with the heads of a row side by side, as kernels read them; rows may lie apart."""
    return x if x.stride(2) == 1 and x.stride(1) == x.shape[2] else x.contiguous()
