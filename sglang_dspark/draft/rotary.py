"""Rotary position embedding in the rotate-half layout, angles in float32."""

from collections.abc import Callable

import torch
from torch import Tensor, nn

from sglang_dspark.draft.config import DraftConfig
from sglang_dspark.draft.rope import inverse_frequencies


class RotaryEmbedding(nn.Module):
    """Cosines and sines for absolute positions.

    The frequencies are a non-persistent buffer that stays float32 when the module is cast: in bfloat16 the angles of
    large positions would be off by whole turns.
    """

    inv_freq: Tensor

    def __init__(self, config: DraftConfig) -> None:
        super().__init__()
        self._frequencies = inverse_frequencies(
            config.rope_theta,
            config.head_dim,
            scaling=config.rope_scaling,
            partial_rotary_factor=config.partial_rotary_factor,
            max_position_embeddings=config.max_position_embeddings,
        )
        self.register_buffer("inv_freq", self._as_tensor(None), persistent=False)

    def forward(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """``positions [n]`` (integer) -> ``(cos, sin)``, each ``[n, 1, head_dim / 2]`` float32; the 1 is for heads."""
        angles = positions.to(torch.float32)[:, None] * self.inv_freq
        return angles.cos()[:, None], angles.sin()[:, None]

    def _as_tensor(self, device: torch.device | None) -> Tensor:
        return torch.tensor(self._frequencies, dtype=torch.float32, device=device)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> "RotaryEmbedding":
        super()._apply(fn, recurse)
        # Recomputed rather than converted: keeps float32, and gives real values after to_empty() from the meta device.
        self.inv_freq = self._as_tensor(self.inv_freq.device)
        return self


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """RoPE on ``x [..., n, heads, head_dim]`` with ``cos, sin [n, 1, head_dim / 2]``; float32 inside, x's dtype out."""
    low, high = x.float().chunk(2, dim=-1)
    return torch.cat((low * cos - high * sin, high * cos + low * sin), dim=-1).to(x.dtype)
