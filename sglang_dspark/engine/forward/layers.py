"""Ask SGLang's model what the attention of verification needs to know."""

from __future__ import annotations

from typing import Any

from sglang.srt.runtime_context import get_parallel


def sliding_window(layer: Any) -> int | None:
    """Return the keys that a row of this ``RadixAttention`` sees at most, its own among them; None if it sees all."""
    # SGLang leaves the row's own key out, and has -1 without a window.
    return int(layer.sliding_window_size) + 1 if layer.sliding_window_size >= 0 else None


def kv_heads_of_rank(model_config: Any) -> int:
    """Return the K/V heads that this rank holds; with more ranks than heads, several hold the same one."""
    return int(model_config.get_num_kv_heads(get_parallel().tp_size))
