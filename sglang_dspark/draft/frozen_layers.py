"""Layers of a drafter that only serves: fused, or stored in eight bits.

A block of a few rows gives a GPU next to nothing to compute, so a layer costs what its launches cost: stacked
projections and fused kernels make a dozen of them.

Kernels read weights in eight bits for a few rows. Where no kernels run, weights are only rounded: they draft the same,
and cost what they did before.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from dspark_kernels import Int8Weight, Weight, add_norm, linear, qk_norm_rope, runs_kernels, silu_mul
from torch import Tensor, nn

from sglang_dspark.draft.backbone import Attend, DecoderLayer, around


class Int8Linear(nn.Module):
    """A linear layer with a weight in eight bits."""

    def __init__(self, weight: Int8Weight, bias: nn.Parameter | None) -> None:
        super().__init__()
        self.weight, self.bias = weight, bias

    def forward(self, rows: Tensor) -> Tensor:
        """Map ``[..., in]`` to ``[..., out]``."""
        return linear(rows, self.weight, self.bias)


def linear_layer(weight: Weight) -> nn.Linear | Int8Linear:
    """Return a layer without a bias that reads a weight ``[out, in]`` where it is."""
    if isinstance(weight, Int8Weight):
        return Int8Linear(weight, None)
    layer = nn.Linear(weight.shape[1], weight.shape[0], bias=False, device="meta")
    layer.weight = nn.Parameter(weight, requires_grad=False)
    return layer


def in_eight_bits(weight: Tensor) -> Weight:
    """Return a copy of a weight ``[out, in]`` in eight bits; where no kernels run, only in its dtype, but rounded."""
    stored = Int8Weight.of(weight.detach())
    return stored if runs_kernels(weight) else stored.rounded


def overwrite(weight: Weight, other: Weight) -> None:
    """Write another weight over one that is stored alike: captured graphs go on reading it."""
    for old, new in zip(_tensors(weight), _tensors(other), strict=True):
        old.copy_(new)


def _tensors(weight: Weight) -> tuple[Tensor, ...]:
    return (weight.codes, weight.scales, weight.rounded) if isinstance(weight, Int8Weight) else (weight,)


def store_in_eight_bits(module: nn.Module, name: str) -> None:
    """Store the weights of ``module.name`` in eight bits, or those of the linear layers in it, at any depth."""
    child = getattr(module, name)
    if not isinstance(child, nn.Linear):
        for inner, _ in list(child.named_children()):
            store_in_eight_bits(child, inner)
    elif isinstance(weight := in_eight_bits(child.weight), Int8Weight):
        setattr(module, name, Int8Linear(weight, child.bias))
    else:
        child.weight.data = weight


def weights_below_each_other(layers: Sequence[Any]) -> Weight:
    """Return a copy of the weights of linear layers, which are stored alike."""
    weights = [layer.weight for layer in layers]
    return Int8Weight.cat(weights) if isinstance(weights[0], Int8Weight) else torch.cat(weights)


def read_from(layers: Sequence[Any], weight: Weight, bias: Tensor | None = None) -> None:
    """Make equal parts of a weight and a bias those of linear layers, which have such ones already.

    So a stack costs no memory, and is never older than its layers.
    """
    parts: Sequence[Weight] = weight.chunk(len(layers))
    for layer, part in zip(layers, parts, strict=True):
        if isinstance(part, Int8Weight):
            layer.weight = part
        else:
            layer.weight.data = part
    for layer, bias_part in zip(layers, () if bias is None else bias.chunk(len(layers)), strict=False):
        layer.bias.data = bias_part


@dataclass(frozen=True)
class FusedLayer:
    """Computes what its ``layer`` computes, with the same roundings.

    Attributes:
        kv_weight: ``[2 * kv_heads * hd, d]``, K before V; storage of the layer's own weights.
        kv_bias: ``[2 * kv_heads * hd]``, likewise; None without attention biases.
        gate_up_weight: ``[2 * I, d]``, gate before up; likewise.
        next_norm: the norm after this layer, of the next one or the last.
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
            The residual stream after the layer, and the same through ``next_norm``.
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
