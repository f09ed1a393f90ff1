"""Recurrent layers of Qwen3.8-27B in bfloat16, on one GPU: verified rows of a layer, and the commit of all layers."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product

import torch
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
from harness import Case, case

_GAMMA, _WIDTH = 7, 4
_LAYERS, _KEY_HEADS, _VALUE_HEADS, _HEAD_DIM = 48, 16, 48, 128
_CHANNELS = (2 * _KEY_HEADS + _VALUE_HEADS) * _HEAD_DIM
_DTYPE = torch.bfloat16
# Of a request in one layer: its state, which is float32; what a row brings to it: k, v, a and b.
_STATE_BYTES = 4 * _VALUE_HEADS * _HEAD_DIM**2
_ROW_BYTES = 2 * ((_KEY_HEADS + _VALUE_HEADS) * _HEAD_DIM + 2 * _VALUE_HEADS)


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
    read = _ROW_BYTES + 2 * (_KEY_HEADS + _VALUE_HEADS) * _HEAD_DIM  # and written: q and the output included
    yield case(
        gated_delta,
        {"bs": bs, "rows": width, "heads": _VALUE_HEADS},
        *(q, DeltaInputs(*inputs), gates, _states(device, bs), rows),
        bytes_moved=bs * (_STATE_BYTES + width * read),
    )
    weight, windows = _rand(device, _CHANNELS, _WIDTH), _rand(device, bs + 1, _CHANNELS, _WIDTH - 1)
    yield case(
        causal_conv_rows,
        {"bs": bs, "rows": width, "C": _CHANNELS},
        *(_rand(device, bs * width, _CHANNELS), weight, None, windows, rows),
        bytes_moved=_CHANNELS * _DTYPE.itemsize * (2 * bs * width + bs * (_WIDTH - 1) + _WIDTH),
    )


def _committed(bs: int, accepted: int, device: torch.device) -> Iterator[Case]:
    lengths = torch.full((bs,), accepted, dtype=torch.int32, device=device)
    rows = ReplayedRows(*_rows(bs, _GAMMA + 1, device), lengths, lengths - 1, torch.full_like(lengths, -1))
    layers = _LAYERS // 6  # all layers of 64 requests hold 9.7 GB of states; a sixth of the layers fills a GPU as well
    _, *inputs = _inputs(device, layers, bs * (_GAMMA + 1))
    gates = DeltaGates(*(torch.rand(layers, _VALUE_HEADS, device=device) for _ in range(2)))
    yield case(
        commit_gated_delta,
        {"bs": bs, "accepted": accepted, "heads": _VALUE_HEADS, "L": layers},
        *(DeltaInputs(*inputs), gates, _states(device, layers, bs), rows),
        bytes_moved=bs * layers * (2 * _STATE_BYTES + accepted * _ROW_BYTES),
    )
    windows = _rand(device, _LAYERS, bs + 1, _CHANNELS, _WIDTH - 1)
    yield case(
        commit_conv_windows,
        {"bs": bs, "accepted": accepted, "C": _CHANNELS, "L": _LAYERS},
        *(_rand(device, _LAYERS, bs * (_GAMMA + 1), _CHANNELS), windows, rows),
        bytes_moved=2 * bs * _LAYERS * _CHANNELS * (_WIDTH - 1) * _DTYPE.itemsize,
    )


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
