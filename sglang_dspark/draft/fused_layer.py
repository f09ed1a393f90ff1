"""A decoder layer of a frozen model in a dozen launches: stacked projections and fused kernels, for CUDA.

A block of a few rows gives a GPU next to nothing to compute, so a layer costs what its launches cost.
"""

from dataclasses import dataclass

from dspark_kernels import Weight, add_norm, linear, qk_norm_rope, silu_mul
from torch import Tensor, nn

from sglang_dspark.draft.backbone import Attend, DecoderLayer
from sglang_dspark.draft.convolution import around
from sglang_dspark.draft.int8_layers import read_from, weights_below_each_other


@dataclass(frozen=True)
class FusedLayer:
    """Computes what its ``layer`` computes, with the same roundings.

    Attributes:
        kv_weight: ``[2 * kv_heads * hd, d]``, K before V; storage of the layer's own weights.
        kv_bias: ``[2 * kv_heads * hd]``, likewise; None without attention biases.
        gate_up_weight: ``[2 * I, d]``, gate before up; likewise.
        next_norm: the norm behind this layer, of the next one or the last.
        eps: of all norms.
    """

    layer: DecoderLayer
    kv_weight: Weight
    kv_bias: Tensor | None
    gate_up_weight: Weight
    next_norm: nn.RMSNorm
    eps: float

    @classmethod
    def build(
        cls, layer: DecoderLayer, kv_weight: Weight, kv_bias: Tensor | None, next_norm: nn.RMSNorm, eps: float
    ) -> "FusedLayer":
        """Move the gate and up weights of ``layer`` into one storage; what makes K/V already lies in its stacks."""
        halves = layer.mlp.gate_proj, layer.mlp.up_proj
        gate_up = weights_below_each_other(halves)
        read_from(halves, gate_up)
        return cls(layer, kv_weight, kv_bias, gate_up, next_norm, eps)

    def forward(
        self,
        index: int,
        hidden: Tensor,
        normed: Tensor,
        positions: Tensor,
        inv_freq: Tensor,
        attend: Attend,
        width: int,
    ) -> tuple[Tensor, Tensor]:
        """Run the layer; ``index`` is for ``attend``.

        Args:
            hidden: ``[T, d]`` residual stream.
            normed: ``[T, d]``, the same through the layer's first norm.
            positions: ``[T]``.
            inv_freq: ``[hd / 2]``.
            width: rows of a block.

        Returns:
            The residual stream behind the layer, and the same through ``next_norm``.
        """
        attention, mlp = self.layer.self_attn, self.layer.mlp
        heads = (-1, attention.head_dim)

        def attended(rows: Tensor) -> Tensor:
            q = attention.q_proj(rows).unflatten(-1, heads)
            k, v = linear(rows, self.kv_weight, self.kv_bias).unflatten(-1, heads).chunk(2, dim=1)
            norms = attention.q_norm.weight, attention.k_norm.weight
            q, k = qk_norm_rope(q, k, *norms, self.eps, inv_freq, positions)
            return attention.output(attend(index, q, k, v, attention.attention_sink_bias))

        def gated(rows: Tensor) -> Tensor:
            return mlp.down_proj(silu_mul(linear(rows, self.gate_up_weight)))

        added = around(self.layer.attention_conv, attended, normed, width)
        hidden, normed = add_norm(hidden, added, self.layer.post_attention_layernorm.weight, self.eps)
        added = around(self.layer.mlp_conv, gated, normed, width)
        return add_norm(hidden, added, self.next_norm.weight, self.eps)
