"""The backbone of the draft network: decoder layers of Qwen3's kind or Gemma 4's, rotary embedding, convolutions.

Attention and the K/V memory belong to the caller (paged pool when serving, packed blocks when training), so a layer
only projects, normalises and rotates, and hands q, k, v of the block rows to an :data:`Attend` callback.

Gemma 4's layers are built as DeepSpec does for Gemma 4 12B. They differ from Qwen3's in their norms, in the scale of
the scores, which is 1, in values that have a norm, too, and in the activation of the MLP. All of them have full
attention.

DFlash 2 has dynamic convolutions along the slots of a block, before and after a sublayer. Both have base kernels of
their own, and what each row adds to these comes from one projection of the sublayer's input.

The rotary embedding has the rotate-half layout, and angles in float32.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

import torch
import torch.nn.functional as F
from dspark_kernels import StepRequests, block_convolution
from torch import Tensor, nn

from sglang_dspark.draft.config import DraftConfig
from sglang_dspark.draft.rope import inverse_frequencies

Sublayer = Callable[[Tensor], Tensor]
"""``[T, d] -> [T, d]``, an attention or an MLP."""


class BlockConvolution(nn.Module):
    """The two convolutions of one sublayer; parameter names are those of DFlash 2."""

    def __init__(self, config: DraftConfig) -> None:
        super().__init__()
        taps, d = config.conv_kernel_size, config.hidden_size
        self.groups = d // config.conv_group_size
        self.base_kernel = nn.Parameter(torch.zeros(2, taps, d))
        self.kernel_projection = nn.Linear(d, 2 * taps * self.groups, bias=False)
        with torch.no_grad():
            self.base_kernel[:, 0] = 1.0  # which changes nothing, except the projection's part

    def around(self, sublayer: Sublayer, rows: Tensor, width: int) -> Tensor:
        """Return what the sublayer makes of ``rows [T, d]``, whose blocks have ``width`` rows each."""
        shape = (2, self.base_kernel.shape[1], self.groups)
        before, after = self.kernel_projection(rows).unflatten(-1, shape).unbind(1)
        convolve = block_convolution.reference if torch.is_grad_enabled() else block_convolution
        convolved = convolve(rows, self.base_kernel[0], before, width)
        return convolve(sublayer(convolved), self.base_kernel[1], after, width)


def around(convolution: BlockConvolution | None, sublayer: Sublayer, rows: Tensor, width: int) -> Tensor:
    """Return what the sublayer makes of ``rows [T, d]``, between convolutions if it has them."""
    return sublayer(rows) if convolution is None else convolution.around(sublayer, rows, width)


class RotaryEmbedding(nn.Module):
    """Cosines and sines for absolute positions.

    The frequencies are a non-persistent buffer that stays float32 when the module is cast: in bfloat16 the angles of
    large positions would be off by whole turns.
    """

    inv_freq: Tensor

    def __init__(self, config: DraftConfig) -> None:
        super().__init__()
        share, longest = config.partial_rotary_factor, config.max_position_embeddings
        base = config.rope_theta, config.head_dim
        self._frequencies = inverse_frequencies(*base, config.rope_scaling, share, longest)
        self.register_buffer("inv_freq", self._as_tensor(None), persistent=False)

    def forward(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Return cos and sin of integer ``positions [n]``: ``[n, 1, head_dim / 2]`` float32 each, 1 for the heads."""
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
    """Rotate ``x [..., n, heads, head_dim]`` by ``cos, sin [n, 1, head_dim / 2]``; float32 inside, x's dtype out."""
    low, high = x.float().chunk(2, dim=-1)
    return torch.cat((low * cos - high * sin, high * cos + low * sin), dim=-1).to(x.dtype)


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
        """Return ``[T, d]`` for ``hidden [T, d]`` of blocks of ``width`` rows and ``cos, sin [T, 1, hd / 2]``."""

        def attention(rows: Tensor) -> Tensor:
            return self.self_attn(layer, rows, cos, sin, attend)

        hidden = hidden + around(self.attention_conv, attention, self.input_layernorm(hidden), width)
        return hidden + around(self.mlp_conv, self.mlp, self.post_attention_layernorm(hidden), width)


class Attention(nn.Module):
    """Projections around the attention: q and k get a per-head RMSNorm, then RoPE.

    Attributes:
        v_proj: None if values are projected as keys are.
        v_norm: per-head RMSNorm of v without weights, in Gemma 4's layers; None in others.
        attention_sink_bias: [heads], named as in published checkpoints; None for a layer without sinks.
    """

    v_proj: nn.Linear | None
    v_norm: nn.RMSNorm | None
    attention_sink_bias: nn.Parameter | None

    def __init__(self, config: DraftConfig, *, has_sinks: bool = False) -> None:
        super().__init__()
        d, head_dim, bias = config.hidden_size, config.head_dim, config.attention_bias
        kv_size, norm = config.num_key_value_heads * head_dim, partial(nn.RMSNorm, head_dim, eps=config.rms_norm_eps)
        self.head_dim, self.value_scale = head_dim, config.attention_value_scale
        self.q_proj = nn.Linear(d, config.num_attention_heads * head_dim, bias=bias)
        self.k_proj = nn.Linear(d, kv_size, bias=bias)
        self.v_proj = None if config.attention_k_eq_v else nn.Linear(d, kv_size, bias=bias)
        self.o_proj = nn.Linear(config.num_attention_heads * head_dim, d, bias=bias)
        self.q_norm, self.k_norm = norm(), norm()
        self.v_norm = norm(elementwise_affine=False) if config.backbone == "gemma4" else None
        self.attention_sink_bias = nn.Parameter(torch.zeros(config.num_attention_heads)) if has_sinks else None

    @property
    def context_projections(self) -> tuple[nn.Linear, ...]:
        """Return the layers that project context rows."""
        return (self.k_proj,) if self.v_proj is None else (self.k_proj, self.v_proj)

    def forward(self, layer: int, hidden: Tensor, cos: Tensor, sin: Tensor, attend: Attend) -> Tensor:
        """Return ``[T, d]`` for normalised ``hidden [T, d]``."""
        heads = (-1, self.head_dim)
        projected = [projection(hidden).unflatten(-1, heads) for projection in self.context_projections]
        q = rotate(self.q_norm(self.q_proj(hidden).unflatten(-1, heads)), cos, sin)
        k = rotate(self.k_norm(projected[0]), cos, sin)
        v = projected[-1] if self.v_norm is None else self.v_norm(projected[-1])
        return self.output(attend(layer, q, k, v, self.attention_sink_bias))

    def output(self, attended: Tensor) -> Tensor:
        """Project ``[T, heads, hd]`` of the attention over unscaled values to ``[T, d]``."""
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
        """Map ``[T, d]`` to ``[T, d]``."""
        return self.down_proj(self._activation(self.gate_proj(hidden)) * self.up_proj(hidden))


class GemmaDecoderLayer(nn.Module):
    """One block with a norm before and after attention and MLP; parameter names are those of Gemma 4.

    Attributes:
        layer_scalar: [1] factor of the block's output.
    """

    def __init__(self, config: DraftConfig) -> None:
        super().__init__()
        norm = partial(nn.RMSNorm, config.hidden_size, eps=config.rms_norm_eps)
        self.input_layernorm, self.post_attention_layernorm = norm(), norm()
        self.pre_feedforward_layernorm, self.post_feedforward_layernorm = norm(), norm()
        self.self_attn = Attention(config)
        self.mlp = GatedMLP(config, activation=partial(F.gelu, approximate="tanh"))
        self.layer_scalar = nn.Parameter(torch.ones(1))

    def forward(self, layer: int, hidden: Tensor, cos: Tensor, sin: Tensor, attend: Attend, width: int) -> Tensor:
        """Return ``[T, d]`` for ``hidden [T, d]`` of blocks of ``width`` rows and ``cos, sin [T, 1, hd / 2]``."""
        attended = self.self_attn(layer, self.input_layernorm(hidden), cos, sin, attend)
        hidden = hidden + self.post_attention_layernorm(attended)
        hidden = hidden + self.post_feedforward_layernorm(self.mlp(self.pre_feedforward_layernorm(hidden)))
        return hidden * self.layer_scalar


def with_normed_values(projected: Tensor, config: DraftConfig) -> Tensor:
    """Norm the values of context rows, which are the keys where one projection stands for both.

    Args:
        projected: ``[n, L * P * kv_heads * hd]`` of the P context projections of all layers.

    Returns:
        ``[n, L * 2 * kv_heads * hd]``, K before V of every layer, K as it was.
    """
    heads = (config.num_hidden_layers, -1, config.num_key_value_heads, config.head_dim)
    rows = projected.unflatten(-1, heads)
    k, v = rows[:, :, 0], rows[:, :, -1]
    return torch.stack((k, F.rms_norm(v, (config.head_dim,), eps=config.rms_norm_eps)), dim=2).flatten(1)


@dataclass(frozen=True)
class DraftWindow:
    """The rows of a context that the drafter sees: the first and the last ones (StreamingLLM, Xiao et al. 2024).

    Attributes:
        size: the last rows.
        sinks: the first rows, on which attention rests that has nothing to look for.
    """

    size: int
    sinks: int

    def of(self, requests: StepRequests) -> StepRequests:
        """Return the same requests with these rows for their contexts. No host sync, safe under graph capture."""
        device, last = requests.anchors.device, requests.req_to_token.shape[1] - 1
        seen = min(self.sinks + self.size, last + 1)
        left_out = (requests.prefix_lens - seen).clamp(min=0)[:, None]
        columns = torch.arange(seen, device=device)
        columns = (columns + left_out * (columns >= self.sinks)).clamp(max=last)
        return replace(
            requests,
            req_to_token=requests.req_to_token[requests.req_pool_indices[:, None], columns],
            req_pool_indices=torch.arange(len(requests), device=device),
            prefix_lens=requests.prefix_lens.clamp(max=seen),
        )
