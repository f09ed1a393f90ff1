"""Stand in for SGLang's kernel package, which is built for CUDA only, where there is no GPU.

SGLang imports its names ending in ``_cpu`` as soon as it starts on a CPU. Servers with DSPARK call those that are
defined here; the others belong to other speculative algorithms. Layers with a gated delta net are computed in plain
torch: sums, states and gates are float32.

Functions without ``_cpu`` have the name of one of SGLang's that launches a Triton kernel on a CPU, too, where it cannot
run; they are put in SGLang's modules.
"""

from collections.abc import Callable
from types import ModuleType
from typing import Any

import torch
from torch.nn.functional import silu

from . import mamba

__version__ = "0"


def fused_sigmoid_mul_cpu(x: torch.Tensor, gate: torch.Tensor) -> None:
    """Multiply ``x`` by its gate, in place."""
    x.mul_(gate.reshape(x.shape).sigmoid())


def fused_qk_gemma_rmsnorm_cpu(
    q: torch.Tensor, k: torch.Tensor, q_weight: torch.Tensor, k_weight: torch.Tensor, eps: float, head_dim: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return [tokens * heads, head size] of both, normalised."""
    return _normalised(q, q_weight, eps, head_dim), _normalised(k, k_weight, eps, head_dim)


def fused_qk_gemma_rmsnorm_with_gate_cpu(
    q_gate: torch.Tensor,
    k: torch.Tensor,
    q_weight: torch.Tensor,
    k_weight: torch.Tensor,
    eps: float,
    head_dim: int,
    num_heads: int,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return the same, of queries whose heads have a gate each after them, and the gates."""
    q, gate = q_gate.view(len(q_gate), num_heads, 2 * head_dim).chunk(2, dim=-1)
    gate = gate.reshape(-1, head_dim).contiguous()  # SGLang views it in another shape
    return *fused_qk_gemma_rmsnorm_cpu(q, k, q_weight, k_weight, eps, head_dim), gate


def _normalised(x: torch.Tensor, weight: torch.Tensor, eps: float, head_dim: int) -> torch.Tensor:
    """Return [tokens * heads, head size], scaled by a weight that is stored less one."""
    x32 = x.reshape(-1, head_dim).float()
    return (x32 * (x32.square().mean(-1, keepdim=True) + eps).rsqrt() * (1 + weight.float())).to(x.dtype)


def fused_qkvzba_split_reshape_cat_contiguous_cpu(
    qkvz: torch.Tensor, ba: torch.Tensor, key_heads: int, value_heads: int, key_size: int, value_size: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return queries, keys and values [tokens, channels], output gates [tokens, value heads, value size], b and a."""
    values = value_heads * value_size
    qkv, z = qkvz.split([2 * key_heads * key_size + values, values], dim=-1)
    b, a = ba.chunk(2, dim=-1)
    return qkv.contiguous(), z.reshape(len(z), value_heads, value_size), b.contiguous(), a.contiguous()


def assign_req_to_token_pool_cpu(
    rows: Any, req_to_token: Any, begins: Any, ends: Any, slots: Any, num_columns: int
) -> None:
    """Write ``slots`` [n] to the columns ``begins[i]..ends[i]-1`` of row ``rows[i]``, one request after the other."""
    lengths = (ends - begins).tolist()
    for row, begin, part in zip(rows.tolist(), begins.tolist(), slots.split(lengths), strict=True):
        req_to_token[row, begin : begin + len(part)] = part


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


class _Torch(ModuleType):
    """Answers what ``torch`` does, except the device of which nothing is said."""

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)

    def get_device_module(self, device: str = "cpu") -> Any:
        """Return the module of a device."""
        return torch.get_device_module(device)


torch_without_cuda = _Torch("torch")
"""The module ``torch`` as SGLang's Qwen3-Next sees it: asked for the current device, it names the CPU.

A build of torch that knows CUDA would look for a GPU.
"""


def __getattr__(name: str) -> Callable[..., Any]:
    if not name.endswith("_cpu"):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")

    def absent(*args: Any, **kwargs: Any) -> Any:
        raise NotImplementedError(f"sgl_kernel.{name} does not exist on a CPU; serve what needs it on a GPU")

    return absent


for _name, _function in [*globals().items(), *vars(mamba).items()]:
    if _name.endswith("_cpu"):
        setattr(torch.ops.sgl_kernel, _name, _function)
