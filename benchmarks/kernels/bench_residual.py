"""A residual with the norm behind it in the draft layers of a Qwen3-4B drafter."""

from __future__ import annotations

from functools import partial

import torch
from dspark_kernels import add_norm, add_norm_ref
from harness import Case

GAMMA, HIDDEN = 7, 2560
DTYPE = torch.bfloat16


def cases(device: torch.device) -> list[Case]:
    """Every batch size."""
    torch.manual_seed(0)
    return [_case(bs * GAMMA, device) for bs in (1, 8, 64, 256)]


def _case(num_rows: int, device: torch.device) -> Case:
    hidden, update = (torch.randn(num_rows, HIDDEN, device=device).to(DTYPE) for _ in range(2))
    weight = torch.ones(HIDDEN, dtype=DTYPE, device=device)
    return Case(
        name="add_norm",
        shape={"rows": num_rows, "d": HIDDEN},
        run=partial(add_norm, hidden, update, weight, 1e-6),
        reference=partial(add_norm_ref, hidden, update, weight, 1e-6),
        bytes_moved=4 * num_rows * HIDDEN * DTYPE.itemsize,
        flops=0,
    )
