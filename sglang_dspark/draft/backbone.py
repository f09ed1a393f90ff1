"""The draft backbone's decoder layers: Qwen3 blocks whose attention is left to the caller (Gemma 4's: ``gemma.py``).

The attention kernel and the K/V memory belong to the caller (paged pool when serving, packed blocks when
training), so a layer only projects, normalises and rotates, and hands q, k, v of the block rows to an :data:`Attend`
callback.
"""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from sglang_dspark.draft.config import DraftConfig
from sglang_dspark.draft.convolution import BlockConvolution, around
from sglang_dspark.draft.rotary import rotate

Attend = Callable[[int, Tensor, Tensor, Tensor, Tensor | None], Tensor]
"""``attend(layer, q [T, heads, hd], k [T, kv_heads, hd], v [T, kv_heads, hd], sinks [heads]) -> [T, heads, hd]``.

q and k come normalised and rotated. The callback attends over what ``config.visibilities[layer]`` shows of the
request's context K/V and of the block rows, with scale ``config.attention_scale``. Where a layer has sinks, the weights
of a head are ``exp(score) / (exp(sink) + sum of exp(score))``; None without them."""


class DecoderLayer(nn.Module):
    """One pre-norm block; parameter names are those of Qwen3.

    Attributes:
        attention_conv, mlp_conv: round attention and MLP; None without convolutions.
    """

    def __init__(self, config: DraftConfig, *, has_sinks: bool = False) -> None:
        super().__init__()
        self.input_layernorm = nn.RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.self_attn = Attention(config, has_sinks=has_sinks)
        self.post_attention_layernorm = nn.RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.mlp = GatedMLP(config)
        self.attention_conv = BlockConvolution(config) if config.conv_kernel_size else None
        self.mlp_conv = BlockConvolution(config) if config.conv_kernel_size else None

    def forward(self, layer: int, hidden: Tensor, cos: Tensor, sin: Tensor, attend: Attend, width: int) -> Tensor:
        """``hidden [T, d]`` of blocks of ``width`` rows, ``cos, sin [T, 1, hd / 2]`` -> ``[T, d]``."""

        def attention(rows: Tensor) -> Tensor:
            return self.self_attn(layer, rows, cos, sin, attend)

        hidden = hidden + around(self.attention_conv, attention, self.input_layernorm(hidden), width)
        return hidden + around(self.mlp_conv, self.mlp, self.post_attention_layernorm(hidden), width)


class Attention(nn.Module):
    """Projections around the attention: q and k get a per-head RMSNorm, then RoPE; v gets neither.

    Attributes:
        attention_sink_bias: [heads], named as in published checkpoints; None for a layer without sinks.
    """

    attention_sink_bias: nn.Parameter | None

    def __init__(self, config: DraftConfig, *, has_sinks: bool) -> None:
        super().__init__()
        d, head_dim, bias = config.hidden_size, config.head_dim, config.attention_bias
        self.head_dim, self.value_scale = head_dim, config.attention_value_scale
        self.q_proj = nn.Linear(d, config.num_attention_heads * head_dim, bias=bias)
        self.k_proj = nn.Linear(d, config.num_key_value_heads * head_dim, bias=bias)
        self.v_proj = nn.Linear(d, config.num_key_value_heads * head_dim, bias=bias)
        self.o_proj = nn.Linear(config.num_attention_heads * head_dim, d, bias=bias)
        self.q_norm = nn.RMSNorm(head_dim, eps=config.rms_norm_eps)
        self.k_norm = nn.RMSNorm(head_dim, eps=config.rms_norm_eps)
        self.attention_sink_bias = nn.Parameter(torch.zeros(config.num_attention_heads)) if has_sinks else None

    @property
    def context_projections(self) -> tuple[nn.Linear, ...]:
        """Return the layer that projects context rows."""
        return self.k_proj, self.v_proj

    def forward(self, layer: int, hidden: Tensor, cos: Tensor, sin: Tensor, attend: Attend) -> Tensor:
        """``hidden [T, d]`` (normalised) -> ``[T, d]``."""
        heads = (-1, self.head_dim)
        q = rotate(self.q_norm(self.q_proj(hidden).unflatten(-1, heads)), cos, sin)
        k = rotate(self.k_norm(self.k_proj(hidden).unflatten(-1, heads)), cos, sin)
        v = self.v_proj(hidden).unflatten(-1, heads)
        return self.output(attend(layer, q, k, v, self.attention_sink_bias))

    def output(self, attended: Tensor) -> Tensor:
        """``[T, heads, hd]`` of the attention over unscaled values -> ``[T, d]``."""
        rows = attended.flatten(-2)
        # The attention is linear in the values, so their scale can wait: K/V of context and block need not know it.
        return self.o_proj(rows if self.value_scale == 1 else rows * self.value_scale)


class GatedMLP(nn.Module):
    """``down(activation(gate(x)) * up(x))``; SwiGLU by default."""

    def __init__(self, config: DraftConfig, activation: Callable[[Tensor], Tensor] = F.silu) -> None:
        super().__init__()
        self._activation = activation
        self.gate_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.up_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.down_proj = nn.Linear(config.intermediate_size, config.hidden_size, bias=False)

    def forward(self, hidden: Tensor) -> Tensor:
        """``[T, d] -> [T, d]``."""
        return self.down_proj(self._activation(self.gate_proj(hidden)) * self.up_proj(hidden))
