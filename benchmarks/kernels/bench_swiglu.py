"""SwiGLU's activation in the draft layers of a Qwen3-4B drafter."""

from __future__ import annotations

from functools import partial

import torch
from dspark_kernels import silu_mul, silu_mul_ref
from harness import Case

GAMMA, INTERMEDIATE = 7, 9728
DTYPE = torch.bfloat16


def cases(device: torch.device) -> list[Case]:
    """Every batch size."""
    torch.manual_seed(0)
    return [_case(bs * GAMMA, device) for bs in (1, 8, 64, 256)]


def _case(num_rows: int, device: torch.device) -> Case:
    gate_up = torch.randn(num_rows, 2 * INTERMEDIATE, device=device).to(DTYPE)
    return Case(
        name="silu_mul",
        shape={"rows": num_rows, "I": INTERMEDIATE},
        run=partial(silu_mul, gate_up),
        reference=partial(silu_mul_ref, gate_up),
        bytes_moved=3 * num_rows * INTERMEDIATE * DTYPE.itemsize,
        flops=0,
    )
