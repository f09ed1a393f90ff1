"""K/V of the drafter: one pool row per K/V slot of the target, so that prefix caching and eviction are shared."""

import torch
from dspark_kernels import CommitRows, kv_inject

from sglang_dspark.draft.config import DraftConfig
from sglang_dspark.draft.model import DraftModel


class DraftCache:
    """Context K/V of all draft layers. Rows of a block being drafted are never stored.

    Slot 0 is padding, which SGLang's allocator never hands out.

    Attributes:
        k, v: [L, slots, kv_heads, hd] in the model's dtype.
        tokens: [slots] int64 tokens whose K/V the slots hold, -1 for parts of pictures.
    """

    def __init__(self, config: DraftConfig, num_slots: int, dtype: torch.dtype, device: torch.device) -> None:
        shape = (config.num_hidden_layers, num_slots, config.num_key_value_heads, config.head_dim)
        self.k = torch.zeros(shape, dtype=dtype, device=device)
        self.v = torch.zeros(shape, dtype=dtype, device=device)
        self.tokens = torch.full((num_slots,), -1, device=device)

    @property
    def num_bytes(self) -> int:
        """Return the memory of the pool in bytes."""
        return self.k.nbytes + self.v.nbytes + self.tokens.nbytes

    def inject(
        self,
        drafter: DraftModel,
        features: torch.Tensor,
        positions: torch.Tensor,
        slots: torch.Tensor,
        rows: CommitRows | None = None,
    ) -> None:
        """Store what target rows contribute to every layer: features [n, m * d], positions and slots [n] int64.

        ``rows`` says which of them are stored; None stores all.
        """
        projected = drafter.context_projection(drafter.project_context(features))
        norm = drafter.context_k_norm, drafter.config.rms_norm_eps
        kv_inject(projected, *norm, drafter.rotary.inv_freq, positions, slots, (self.k, self.v), rows)

    def remember(self, tokens: torch.Tensor, slots: torch.Tensor) -> None:
        """Store which tokens [n] the slots [n] hold."""
        self.tokens[slots] = tokens


def bytes_per_token(config: DraftConfig, dtype: torch.dtype) -> int:
    """Return the pool memory of one token in bytes."""
    kv = 2 * config.num_hidden_layers * config.num_key_value_heads * config.head_dim * dtype.itemsize
    return kv + torch.int64.itemsize
