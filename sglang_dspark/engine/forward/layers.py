"""What the attention of verification asks of SGLang's model."""

from __future__ import annotations

from typing import Any

from sglang.srt.runtime_context import get_parallel


def sliding_window(layer: Any) -> int | None:
    """Keys that a row of this ``RadixAttention`` sees at most, its own among them; None where it sees all of them."""
    # SGLang leaves the row's own key out, and has -1 where there is no window.
    return int(layer.sliding_window_size) + 1 if layer.sliding_window_size >= 0 else None


def kv_heads_of_rank(model_config: Any) -> int:
    """K/V heads that this rank holds; with more ranks than heads, several hold the same one."""
    return int(model_config.get_num_kv_heads(get_parallel().tp_size))
