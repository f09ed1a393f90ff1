"""Ask SGLang's model what the attention of verification needs to know."""

from __future__ import annotations

from typing import Any

import torch
from sglang.srt.runtime_context import get_parallel


def sliding_window(layer: Any) -> int | None:
    """Return the keys that a row of this ``RadixAttention`` sees at most, its own among them; None if it sees all."""
    # SGLang leaves the row's own key out, and has -1 without a window.
    return int(layer.sliding_window_size) + 1 if layer.sliding_window_size >= 0 else None


def kv_heads_of_rank(model_config: Any) -> int:
    """Return the K/V heads that this rank holds; with more ranks than heads, several hold the same one."""
    return int(model_config.get_num_kv_heads(get_parallel().tp_size))


def row_bounds(layout: Any, rows: torch.Tensor) -> torch.Tensor:
    """Return [bs + 1] int, the first row of each request of a verification.

    The dummy forwards by which SGLang tunes experts verify as many rows for every request.

    Args:
        layout: ``spec_info`` of the batch.
        rows: [N, ...] anything of its rows.
    """
    indptr: torch.Tensor | None = getattr(layout, "indptr", None)
    return torch.arange(0, len(rows) + 1, layout.draft_token_num, device=rows.device) if indptr is None else indptr
