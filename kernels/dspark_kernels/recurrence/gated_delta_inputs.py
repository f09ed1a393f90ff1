"""The inputs and weights of a layer with the gated delta rule, and their layout in memory."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class DeltaInputs:
    """The inputs of rows to the state of a layer; in a commit of L layers, stacked along a dimension in front.

    Heads of a row lie side by side; rows may lie apart, as parts of wider ones do. Any floating-point dtypes.

    Attributes:
        k: [N, H, K].
        v: [N, HV, V]; HV is a multiple of H.
        a: [N, HV], of the decay.
        b: [N, HV], of the strength of the update.
    """

    k: torch.Tensor
    v: torch.Tensor
    a: torch.Tensor
    b: torch.Tensor


@dataclass(frozen=True)
class DeltaGates:
    """Weights of a layer's decay; in a commit of L layers, stacked along a dimension in front. Contiguous.

    Attributes:
        a_log: [HV].
        dt_bias: [HV].
    """

    a_log: torch.Tensor
    dt_bias: torch.Tensor


def check(inputs: DeltaInputs, gates: DeltaGates, states: torch.Tensor, q: torch.Tensor | None = None) -> None:
    """Compare shapes and layouts with those that the kernels read.

    Args:
        inputs: of the rows, of one layer or of L.
        gates: likewise.
        states: pool of one layer, or pools of L.
        q: of verified rows.

    Raises:
        ValueError: shapes that do not fit together, or parts that do not lie side by side.
    """
    *leading, num_heads, value_dim = inputs.v.shape
    num_key_heads, key_dim = inputs.k.shape[-2:]
    layers = leading[:-1]
    per_head, keys = [*leading, num_heads], [*leading, num_key_heads, key_dim]
    expected = [
        ("k", inputs.k, keys, 2),
        ("v", inputs.v, [*per_head, value_dim], 2),
        ("a", inputs.a, per_head, 1),
        ("b", inputs.b, per_head, 1),
        ("a_log", gates.a_log, [*layers, num_heads], len(layers) + 1),
        ("dt_bias", gates.dt_bias, [*layers, num_heads], len(layers) + 1),
        ("states", states, [*layers, states.shape[len(layers)], num_heads, value_dim, key_dim], 3),
        *([] if q is None else [("q", q, keys, 2)]),
    ]
    for name, part, shape, packed in expected:
        if list(part.shape) != shape or num_heads % num_key_heads:
            raise ValueError(
                f"{name} is {list(part.shape)} where k {list(inputs.k.shape)} and v {list(inputs.v.shape)} "
                f"need {shape}, with a multiple of the key heads as value heads"
            )
        if not _is_packed(part, packed):
            raise ValueError(f"the last {packed} dimensions of {name} must be contiguous")


def _is_packed(x: torch.Tensor, num_dims: int) -> bool:
    """Return whether the last dimensions are contiguous; those in front may have any strides."""
    expected = 1
    for size, stride in reversed(list(zip(x.shape, x.stride(), strict=True))[-num_dims:]):
        if size != 1 and stride != expected:
            return False
        expected *= size
    return True
