"""Recurrent layers of Qwen3.8-27B in bfloat16, on one GPU: verified rows of a layer, and the commit of all layers."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product

import torch
from cases import Case, case
from dspark_kernels import (
    DeltaGates,
    DeltaInputs,
    ReplayedRows,
    StateRows,
    causal_conv_rows,
    commit_conv_windows,
    commit_gated_delta,
    gated_delta,
)

_GAMMA, _WIDTH = 7, 4
_LAYERS, _KEY_HEADS, _VALUE_HEADS, _HEAD_DIM = 48, 16, 48, 128
_CHANNELS = (2 * _KEY_HEADS + _VALUE_HEADS) * _HEAD_DIM
_DTYPE = torch.bfloat16


def cases(device: torch.device) -> Iterator[Case]:
    """Yield full windows and plain decode steps; commits of half the drafts."""
    for width, bs in product((1, _GAMMA + 1), (1, 8, 64)):
        yield from _verified(bs, width, device)
    for bs in (1, 8, 64):
        yield from _committed(bs, 1 + _GAMMA // 2, device)


def _verified(bs: int, width: int, device: torch.device) -> Iterator[Case]:
    rows = StateRows(*_rows(bs, width, device))
    q, *inputs = _inputs(device, bs * width)
    gates = DeltaGates(*(torch.rand(_VALUE_HEADS, device=device) for _ in range(2)))
    yield case(gated_delta, q, DeltaInputs(*inputs), gates, _states(device, bs), rows)
    weight, windows = _rand(device, _CHANNELS, _WIDTH), _rand(device, bs + 1, _CHANNELS, _WIDTH - 1)
    yield case(causal_conv_rows, _rand(device, bs * width, _CHANNELS), weight, None, windows, rows)


def _committed(bs: int, accepted: int, device: torch.device) -> Iterator[Case]:
    lengths = torch.full((bs,), accepted, dtype=torch.int32, device=device)
    rows = ReplayedRows(*_rows(bs, _GAMMA + 1, device), lengths, lengths - 1, torch.full_like(lengths, -1))
    _, *inputs = _inputs(device, _LAYERS, bs * (_GAMMA + 1))
    gates = DeltaGates(*(torch.rand(_LAYERS, _VALUE_HEADS, device=device) for _ in range(2)))
    yield case(commit_gated_delta, DeltaInputs(*inputs), gates, _states(device, _LAYERS, bs), rows)
    windows = _rand(device, _LAYERS, bs + 1, _CHANNELS, _WIDTH - 1)
    yield case(commit_conv_windows, _rand(device, _LAYERS, bs * (_GAMMA + 1), _CHANNELS), windows, rows)


def _rows(bs: int, width: int, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    indptr = torch.arange(0, bs * width + 1, width, dtype=torch.int32, device=device)
    return indptr, 1 + torch.randperm(bs, device=device).to(torch.int32)


def _rand(device: torch.device, *sizes: int) -> torch.Tensor:
    return torch.randn(*sizes, device=device).to(_DTYPE)


def _inputs(device: torch.device, *leading: int) -> list[torch.Tensor]:
    """Return q, k, v, a and b."""
    keys, values = (_KEY_HEADS, _HEAD_DIM), (_VALUE_HEADS, _HEAD_DIM)
    return [_rand(device, *leading, *sizes) for sizes in (keys, keys, values, values[:1], values[:1])]


def _states(device: torch.device, *leading: int) -> torch.Tensor:
    *layers, bs = leading
    return torch.randn(*layers, bs + 1, _VALUE_HEADS, _HEAD_DIM, _HEAD_DIM, device=device)
