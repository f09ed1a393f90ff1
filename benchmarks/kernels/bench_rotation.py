"""The elementwise parts of a draft layer of a Qwen3-4B drafter: norms with RoPE, and SwiGLU."""

from __future__ import annotations

from functools import partial

import torch
from dspark_kernels.attention.rotation import qk_norm_rope, qk_norm_rope_ref
from dspark_kernels.drafting.swiglu import silu_mul, silu_mul_ref
from harness import Case

GAMMA = 7
HEADS, KV_HEADS, HEAD_DIM, INTERMEDIATE = 32, 8, 128, 9728
DTYPE = torch.bfloat16


def cases(device: torch.device) -> list[Case]:
    """Both at every batch size."""
    torch.manual_seed(0)
    return [case for bs in (1, 8, 64, 256) for case in (_rotate(bs * GAMMA, device), _activate(bs * GAMMA, device))]


def _rotate(num_rows: int, device: torch.device) -> Case:
    projected = torch.randn(num_rows, HEADS + 2 * KV_HEADS, HEAD_DIM, device=device).to(DTYPE)
    q, k, _ = projected.split([HEADS, KV_HEADS, KV_HEADS], dim=1)
    weights = [torch.ones(HEAD_DIM, dtype=DTYPE, device=device) for _ in range(2)]
    inv_freq = 1e6 ** (-torch.arange(0, HEAD_DIM, 2, device=device) / HEAD_DIM)
    arguments = (q, k, *weights, 1e-6, inv_freq, torch.randint(0, 32768, (num_rows,), device=device))
    return Case(
        name="qk_norm_rope",
        shape={"rows": num_rows, "heads": HEADS, "kv_heads": KV_HEADS, "hd": HEAD_DIM},
        run=partial(qk_norm_rope, *arguments),
        reference=partial(qk_norm_rope_ref, *arguments),
        bytes_moved=2 * num_rows * (HEADS + KV_HEADS) * HEAD_DIM * DTYPE.itemsize,
        flops=0,
    )


def _activate(num_rows: int, device: torch.device) -> Case:
    gate_up = torch.randn(num_rows, 2 * INTERMEDIATE, device=device).to(DTYPE)
    return Case(
        name="silu_mul",
        shape={"rows": num_rows, "I": INTERMEDIATE},
        run=partial(silu_mul, gate_up),
        reference=partial(silu_mul_ref, gate_up),
        bytes_moved=3 * num_rows * INTERMEDIATE * DTYPE.itemsize,
        flops=0,
    )
