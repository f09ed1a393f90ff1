"""A decoder layer of a frozen model in a dozen launches: stacked projections and fused kernels, for CUDA.

A block of a few rows gives a GPU next to nothing to compute, so a layer costs what its launches cost.
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from dspark_kernels import qk_norm_rope, silu_mul
from torch import Tensor

from sglang_dspark.draft.backbone import Attend, DecoderLayer


@dataclass(frozen=True)
class FusedLayer:
    """Computes what its ``layer`` computes, with the same roundings.

    Attributes:
        kv_weight: ``[2 * kv_heads * hd, d]``, K before V; storage of the layer's own parameters.
        kv_bias: ``[2 * kv_heads * hd]``; None without attention biases.
        gate_up_weight: ``[2 * I, d]``, gate before up; likewise.
        eps: of the norms of q and k.
    """

    layer: DecoderLayer
    kv_weight: Tensor
    kv_bias: Tensor | None
    gate_up_weight: Tensor
    eps: float

    @classmethod
    def build(cls, layer: DecoderLayer, kv_weight: Tensor, kv_bias: Tensor | None, eps: float) -> "FusedLayer":
        """Move the gate and up weights of ``layer`` into one storage; its K/V weights already lie in ``kv_weight``."""
        mlp = layer.mlp
        gate_up = torch.cat((mlp.gate_proj.weight.data, mlp.up_proj.weight.data))
        mlp.gate_proj.weight.data, mlp.up_proj.weight.data = gate_up.chunk(2)
        return cls(layer, kv_weight, kv_bias, gate_up, eps)

    def forward(self, index: int, hidden: Tensor, positions: Tensor, inv_freq: Tensor, attend: Attend) -> Tensor:
        """``hidden [T, d]``, ``positions [T]``, ``inv_freq [hd / 2]`` -> ``[T, d]``; ``index`` is for ``attend``."""
        attention, mlp = self.layer.self_attn, self.layer.mlp
        heads = (-1, attention.head_dim)
        normed = self.layer.input_layernorm(hidden)
        q = attention.q_proj(normed).unflatten(-1, heads)
        k, v = F.linear(normed, self.kv_weight, self.kv_bias).unflatten(-1, heads).chunk(2, dim=1)
        norms = attention.q_norm.weight, attention.k_norm.weight
        q, k = qk_norm_rope(q, k, *norms, self.eps, inv_freq, positions)
        hidden = hidden + attention.output(attend(index, q, k, v, attention.attention_sink_bias))
        gate_up = F.linear(self.layer.post_attention_layernorm(hidden), self.gate_up_weight)
        return hidden + mlp.down_proj(silu_mul(gate_up))
