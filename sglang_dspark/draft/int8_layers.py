"""Layers of a frozen drafter whose weights are stored in eight bits, too.

Kernels read these for a few rows. Where no kernels run, weights are only rounded: they draft the same, and cost what
they did before.
"""

from collections.abc import Sequence
from typing import Any

import torch
from dspark_kernels import Int8Weight, Weight, linear, runs_kernels
from torch import Tensor, nn


class Int8Linear(nn.Module):
    """A linear layer by a weight in eight bits."""

    def __init__(self, weight: Int8Weight, bias: nn.Parameter | None) -> None:
        super().__init__()
        self.weight, self.bias = weight, bias

    def forward(self, rows: Tensor) -> Tensor:
        """``[..., in] -> [..., out]``."""
        return linear(rows, self.weight, self.bias)


def in_eight_bits(weight: Tensor) -> Weight:
    """Return a copy of a weight ``[out, in]`` in eight bits; where no kernels run, in its dtype alone, but rounded."""
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
