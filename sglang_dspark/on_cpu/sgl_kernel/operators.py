"""Operators around a gated delta net and in the attention beside it, as SGLang's models of Qwen3.5 look them up."""

import torch


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
    """Return the same, of queries whose heads have a gate each behind them, and the gates."""
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
