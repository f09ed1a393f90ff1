"""The short convolution of hybrid targets in bfloat16: verified rows of a layer, and the commit of all layers."""

from __future__ import annotations

from functools import partial

import torch
from dspark_kernels import (
    ReplayedRows,
    StateRows,
    causal_conv_rows,
    causal_conv_rows_ref,
    commit_conv_windows,
    commit_conv_windows_ref,
)
from harness import Case

GAMMA, WIDTH = 7, 4
LAYERS, CHANNELS = 48, 10_240  # Qwen3.8-27B: q and k of 16 heads, v of 48, 128 wide
DTYPE = torch.bfloat16


def cases(device: torch.device) -> list[Case]:
    """Full windows and plain decode steps; commits of half the drafts."""
    torch.manual_seed(0)
    verified = [_verified(bs, width, device) for width in (1, GAMMA + 1) for bs in (1, 8, 64)]
    return verified + [_committed(bs, 1 + GAMMA // 2, device) for bs in (1, 8, 64)]


def _rows(bs: int, width: int, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    indptr = torch.arange(0, bs * width + 1, width, dtype=torch.int32, device=device)
    return indptr, 1 + torch.randperm(bs, device=device).to(torch.int32)


def _rand(*sizes: int, device: torch.device) -> torch.Tensor:
    return torch.randn(*sizes, device=device).to(DTYPE)


def _verified(bs: int, width: int, device: torch.device) -> Case:
    rows = StateRows(*_rows(bs, width, device))
    weight, windows = _rand(CHANNELS, WIDTH, device=device), _rand(bs + 1, CHANNELS, WIDTH - 1, device=device)
    arguments = _rand(bs * width, CHANNELS, device=device), weight, None, windows, rows
    return Case(
        name="causal_conv_rows",
        shape={"bs": bs, "rows": width, "C": CHANNELS},
        run=partial(causal_conv_rows, *arguments),
        reference=partial(causal_conv_rows_ref, *arguments),
        bytes_moved=CHANNELS * DTYPE.itemsize * (2 * bs * width + bs * (WIDTH - 1) + WIDTH),
        flops=0,
    )


def _committed(bs: int, accepted: int, device: torch.device) -> Case:
    lengths = torch.full((bs,), accepted, dtype=torch.int32, device=device)
    rows = ReplayedRows(*_rows(bs, GAMMA + 1, device), lengths, lengths - 1, torch.full_like(lengths, -1))
    windows = _rand(LAYERS, bs + 1, CHANNELS, WIDTH - 1, device=device)
    arguments = _rand(LAYERS, bs * (GAMMA + 1), CHANNELS, device=device), windows, rows
    return Case(
        name="commit_conv_windows",
        shape={"bs": bs, "accepted": accepted, "C": CHANNELS, "L": LAYERS},
        run=partial(commit_conv_windows, *arguments),
        reference=partial(commit_conv_windows_ref, *arguments),
        bytes_moved=2 * bs * LAYERS * CHANNELS * (WIDTH - 1) * DTYPE.itemsize,
        flops=0,
    )
