"""K/V of the drafter: one pool row per K/V slot of the target, so that prefix caching and eviction are shared."""

from __future__ import annotations

import torch

from sglang_dspark.draft.config import DraftConfig

PADDING_SLOT = 0
"""Slot that SGLang's allocator never hands out: writes of rows that must not be kept go there."""


class DraftCache:
    """Context K/V of all draft layers. Rows of a block being drafted are never stored.

    Attributes:
        k, v: [L, slots, kv_heads, hd] in the model's dtype.
    """

    def __init__(self, config: DraftConfig, num_slots: int, dtype: torch.dtype, device: torch.device) -> None:
        shape = (config.num_hidden_layers, num_slots, config.num_key_value_heads, config.head_dim)
        self.k = torch.zeros(shape, dtype=dtype, device=device)
        self.v = torch.zeros(shape, dtype=dtype, device=device)

    @property
    def num_bytes(self) -> int:
        """Memory of the pool in bytes."""
        return 2 * self.k.numel() * self.k.element_size()

    def write(self, slots: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> None:
        """Store ``k, v`` [L, n, kv_heads, hd] at ``slots`` [n] int64."""
        self.k[:, slots] = k.to(self.k.dtype)
        self.v[:, slots] = v.to(self.v.dtype)


def bytes_per_token(config: DraftConfig, dtype: torch.dtype) -> int:
    """Pool memory of one token in bytes."""
    return 2 * config.num_hidden_layers * config.num_key_value_heads * config.head_dim * dtype.itemsize
