"""What the attention of verification asks of a layer of SGLang's."""

from __future__ import annotations

from typing import Any


def sliding_window(layer: Any) -> int | None:
    """Keys that a row of this ``RadixAttention`` sees at most, its own among them; None where it sees all of them."""
    # SGLang leaves the row's own key out, and has -1 where there is no window.
    return int(layer.sliding_window_size) + 1 if layer.sliding_window_size >= 0 else None
