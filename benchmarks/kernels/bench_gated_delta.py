"""The gated delta rule of hybrid targets, on one GPU: verified rows of a layer, and the commit of all layers."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import torch
from dspark_kernels import (
    DeltaGates,
    DeltaInputs,
    ReplayedRows,
    StateRows,
    commit_gated_delta,
    commit_gated_delta_ref,
    gated_delta,
    gated_delta_ref,
)
from harness import Case

GAMMA = 7
DTYPE = torch.bfloat16


@dataclass(frozen=True)
class Shape:
    """Recurrent layers of a model; states are float32, rows 16 bits.

    Attributes:
        layers: with the gated delta rule.
        key_heads: of one layer.
        value_heads: of one layer.
        head_dim: of keys and of values.
    """

    layers: int
    key_heads: int
    value_heads: int
    head_dim: int = 128

    @property
    def state_bytes(self) -> int:
        """Return the bytes of a request's state in one layer."""
        return 4 * self.value_heads * self.head_dim**2

    @property
    def replayed_bytes(self) -> int:
        """Return the bytes of what a row brings to the state of one layer: k, v, a and b."""
        return 2 * ((self.key_heads + self.value_heads) * self.head_dim + 2 * self.value_heads)

    @property
    def verified_bytes(self) -> int:
        """Return the bytes of what verification reads and writes for a row of one layer, q and the output included."""
        return self.replayed_bytes + 2 * (self.key_heads + self.value_heads) * self.head_dim

    def replay_bytes(self, rows: int, accepted: int) -> int:
        """Return the bytes that a step moves for one request and layer.

        Verification reads the state; the commit reads the accepted rows again, and reads and writes the state. What is
        replayed is written once more, to where it is kept.
        """
        kept = rows * self.replayed_bytes
        return 3 * self.state_bytes + rows * self.verified_bytes + kept + accepted * self.replayed_bytes

    def snapshot_bytes(self, rows: int) -> int:
        """Return the bytes of a step that writes the state of every row, and copies the accepted one."""
        return (rows + 3) * self.state_bytes + rows * self.verified_bytes


SHAPES = {"Qwen3.5-9B": Shape(24, 16, 32), "Qwen3.6-35B-A3B": Shape(30, 16, 32), "Qwen3.8-27B": Shape(48, 16, 48)}


def cases(device: torch.device) -> list[Case]:
    """Full windows and plain decode steps; commits of half the drafts."""
    torch.manual_seed(0)
    shape = SHAPES["Qwen3.8-27B"]
    verified = [_verified(bs, width, shape, device) for width in (1, GAMMA + 1) for bs in (1, 8, 64)]
    return verified + [_committed(bs, 1 + GAMMA // 2, shape, device) for bs in (1, 8, 64)]


def _rows(bs: int, width: int, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    indptr = torch.arange(0, bs * width + 1, width, dtype=torch.int32, device=device)
    return indptr, 1 + torch.randperm(bs, device=device).to(torch.int32)


def _inputs(shape: Shape, num_rows: int, leading: tuple[int, ...], device: torch.device) -> tuple[torch.Tensor, ...]:
    def rand(*sizes: int) -> torch.Tensor:
        return torch.randn(*leading, num_rows, *sizes, device=device).to(DTYPE)

    keys, values = (shape.key_heads, shape.head_dim), (shape.value_heads, shape.head_dim)
    return rand(*keys), rand(*keys), rand(*values), rand(shape.value_heads), rand(shape.value_heads)


def _states(shape: Shape, layers: int, bs: int, device: torch.device) -> torch.Tensor:
    return torch.randn(layers, bs + 1, shape.value_heads, shape.head_dim, shape.head_dim, device=device)


def _verified(bs: int, width: int, shape: Shape, device: torch.device) -> Case:
    q, *inputs = _inputs(shape, bs * width, (), device)
    gates = DeltaGates(*(torch.rand(shape.value_heads, device=device) for _ in range(2)))
    arguments = q, DeltaInputs(*inputs), gates, _states(shape, 1, bs, device)[0], StateRows(*_rows(bs, width, device))
    return Case(
        name="gated_delta",
        shape={"bs": bs, "rows": width, "heads": shape.value_heads},
        run=partial(gated_delta, *arguments),
        reference=partial(gated_delta_ref, *arguments),
        bytes_moved=bs * (shape.state_bytes + width * shape.verified_bytes),
        flops=0,
    )


def _committed(bs: int, accepted: int, shape: Shape, device: torch.device) -> Case:
    # All layers of 64 requests hold 9.7 GB of states; a sixth of the layers fills a GPU as well.
    layers = shape.layers // 6
    _, *inputs = _inputs(shape, bs * (GAMMA + 1), (layers,), device)
    gates = DeltaGates(*(torch.rand(layers, shape.value_heads, device=device) for _ in range(2)))
    lengths = torch.full((bs,), accepted, dtype=torch.int32, device=device)
    rows = ReplayedRows(*_rows(bs, GAMMA + 1, device), lengths, lengths - 1, torch.full_like(lengths, -1))
    arguments = DeltaInputs(*inputs), gates, _states(shape, layers, bs, device), rows
    return Case(
        name="commit_gated_delta",
        shape={"bs": bs, "accepted": accepted, "heads": shape.value_heads, "L": layers},
        run=partial(commit_gated_delta, *arguments),
        reference=partial(commit_gated_delta_ref, *arguments),
        bytes_moved=bs * layers * (2 * shape.state_bytes + accepted * shape.replayed_bytes),
        flops=0,
    )
