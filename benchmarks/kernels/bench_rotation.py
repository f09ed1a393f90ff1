"""Norms with RoPE in the draft layers of a Qwen3-4B drafter."""

from __future__ import annotations

from functools import partial

import torch
from dspark_kernels import qk_norm_rope, qk_norm_rope_ref
from harness import Case

GAMMA = 7
HEADS, KV_HEADS, HEAD_DIM = 32, 8, 128
DTYPE = torch.bfloat16


def cases(device: torch.device) -> list[Case]:
    """Every batch size."""
    torch.manual_seed(0)
    return [_case(bs * GAMMA, device) for bs in (1, 8, 64, 256)]


def _case(num_rows: int, device: torch.device) -> Case:
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
