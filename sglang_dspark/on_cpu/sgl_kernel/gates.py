"""Functions of SGLang that launch a Triton kernel on a CPU, too, where it cannot run: gated norms and experts.

Each has the name of SGLang's, in whose module it is put.
"""

from typing import Any

import torch
from torch.nn.functional import silu


def layernorm_fn(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: None,
    z: torch.Tensor,
    eps: float = 1e-6,
    activation: str = "swish",
    **_: Any,
) -> torch.Tensor:
    """Return ``x``, normalised and then gated by ``z``."""
    return rms_norm_gated(x, z, weight, bias, activation, eps=eps)


def rms_norm_gated(
    x: torch.Tensor,
    g: torch.Tensor,
    weight: torch.Tensor,
    bias: None,
    activation: str = "swish",
    *,
    eps: float = 1e-6,
    **_: Any,
) -> torch.Tensor:
    """Return ``x``, normalised and then gated by ``g``."""
    x32 = x.float()
    gate = g.float().sigmoid() if activation == "sigmoid" else silu(g.float())
    return (x32 * (x32.square().mean(-1, keepdim=True) + eps).rsqrt() * weight.float() * gate).to(x.dtype)


def fused_gate_sigmoid_mul_add(
    hidden: torch.Tensor, gate_weight: torch.Tensor, shared: torch.Tensor, routed: torch.Tensor
) -> None:
    """Add what the shared expert says [tokens, d], times its gate, to what the others say, in place."""
    gate = (hidden.float() @ gate_weight.float()).sigmoid()
    routed += (gate[:, None] * shared.float()).to(routed.dtype)
