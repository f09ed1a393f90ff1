"""Decoder layers of a drafter with Gemma 4's backbone, as DeepSpec builds them for Gemma 4 12B.

They differ from those of ``backbone.py`` in their norms, in the scale of the scores, which is 1, in values that have a
norm, too, and in the activation of the MLP. All of them have full attention.
"""

from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from sglang_dspark.draft.backbone import Attend, GatedMLP
from sglang_dspark.draft.config import DraftConfig
from sglang_dspark.draft.rotary import rotate


class GemmaDecoderLayer(nn.Module):
    """One block with a norm before and behind attention and MLP; parameter names are those of Gemma 4.

    Attributes:
        layer_scalar: [1] factor of the block's output.
    """

    def __init__(self, config: DraftConfig) -> None:
        super().__init__()
        norm = partial(nn.RMSNorm, config.hidden_size, eps=config.rms_norm_eps)
        self.input_layernorm, self.post_attention_layernorm = norm(), norm()
        self.pre_feedforward_layernorm, self.post_feedforward_layernorm = norm(), norm()
        self.self_attn = GemmaAttention(config)
        self.mlp = GatedMLP(config, activation=partial(F.gelu, approximate="tanh"))
        self.layer_scalar = nn.Parameter(torch.ones(1))

    def forward(self, layer: int, hidden: Tensor, cos: Tensor, sin: Tensor, attend: Attend, width: int) -> Tensor:
        """``hidden [T, d]`` of blocks of ``width`` rows, ``cos, sin [T, 1, hd / 2]`` -> ``[T, d]``."""
        attended = self.self_attn(layer, self.input_layernorm(hidden), cos, sin, attend)
        hidden = hidden + self.post_attention_layernorm(attended)
        hidden = hidden + self.post_feedforward_layernorm(self.mlp(self.pre_feedforward_layernorm(hidden)))
        return hidden * self.layer_scalar


class GemmaAttention(nn.Module):
    """Projections around the attention: q, k and v get a per-head RMSNorm, that of v without weights, q and k RoPE.

    Attributes:
        v_proj: None if values are projected as keys are.
    """

    v_proj: nn.Linear | None

    def __init__(self, config: DraftConfig) -> None:
        super().__init__()
        d, self.head_dim = config.hidden_size, config.head_dim
        self.q_proj = nn.Linear(d, config.num_attention_heads * self.head_dim, bias=False)
        self.k_proj = nn.Linear(d, config.num_key_value_heads * self.head_dim, bias=False)
        self.v_proj = None if config.attention_k_eq_v else nn.Linear(d, self.k_proj.out_features, bias=False)
        self.o_proj = nn.Linear(config.num_attention_heads * self.head_dim, d, bias=False)
        self.q_norm = nn.RMSNorm(self.head_dim, eps=config.rms_norm_eps)
        self.k_norm = nn.RMSNorm(self.head_dim, eps=config.rms_norm_eps)
        self.v_norm = nn.RMSNorm(self.head_dim, eps=config.rms_norm_eps, elementwise_affine=False)

    @property
    def context_projections(self) -> tuple[nn.Linear, ...]:
        """Return the layer that projects context rows."""
        return (self.k_proj,) if self.v_proj is None else (self.k_proj, self.v_proj)

    def forward(self, layer: int, hidden: Tensor, cos: Tensor, sin: Tensor, attend: Attend) -> Tensor:
        """``hidden [T, d]`` (normalised) -> ``[T, d]``."""
        heads = (-1, self.head_dim)
        projected = [projection(hidden).unflatten(-1, heads) for projection in self.context_projections]
        q = rotate(self.q_norm(self.q_proj(hidden).unflatten(-1, heads)), cos, sin)
        k = rotate(self.k_norm(projected[0]), cos, sin)
        return self.o_proj(attend(layer, q, k, self.v_norm(projected[-1]), None).flatten(-2))


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
