"""The rows of a verification in layers that keep a recurrent state: recorded, and run again by the commit."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

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
from sglang.srt.layers.radix_linear_attention import RadixLinearAttention


@dataclass(frozen=True)
class StatePools:
    """The states of all recurrent layers of a target.

    Attributes:
        windows: [L, slots, C, W - 1], of the convolutions.
        states: [L, slots, HV, V, K].
    """

    windows: torch.Tensor
    states: torch.Tensor

    @property
    def nbytes(self) -> int:
        """Return the bytes of all slots."""
        return self.windows.nbytes + self.states.nbytes


@dataclass(frozen=True)
class RecordedRows:
    """Hold what the rows of a verification bring to its recurrent layers, until the commit.

    Attributes:
        inputs: [L, N, C] of the convolutions.
        convolved: [L, N, C] queries, keys and values.
        a: [L, N, HV], of the decays.
        b: [L, N, HV], of the strengths of the updates.
    """

    inputs: torch.Tensor
    convolved: torch.Tensor
    a: torch.Tensor
    b: torch.Tensor

    @classmethod
    def empty(cls, pools: StatePools, num_rows: int, dtype: torch.dtype) -> RecordedRows:
        """Return buffers for so many rows."""
        num_layers, _, num_channels, _ = pools.windows.shape
        inputs, convolved = pools.windows.new_empty((2, num_layers, num_rows, num_channels), dtype=dtype)
        a, b = pools.windows.new_empty((2, num_layers, num_rows, pools.states.shape[2]), dtype=dtype)
        return cls(inputs, convolved, a, b)

    @property
    def num_rows(self) -> int:
        """Return N."""
        return self.inputs.shape[1]

    def first(self, num_rows: int) -> RecordedRows:
        """Return the part of the first rows."""
        return RecordedRows(*(part[:, :num_rows] for part in vars(self).values()))


@dataclass(frozen=True)
class Tracks:
    """Name the slots at which the radix cache gets states from the middle of a text.

    Attributes:
        slots: [bs] int64, a second slot of each request; below 0 none is stored.
        prefix_lens: [bs] int64, tokens that the state of a request has seen.
        interval: tokens between two such states.
    """

    slots: torch.Tensor
    prefix_lens: torch.Tensor
    interval: int

    def lengths(self, rows: torch.Tensor) -> torch.Tensor:
        """Return [bs] int64: the rows behind which a state is stored; below 1 if the first ``rows`` [bs] pass none."""
        before = self.prefix_lens[: len(rows)]
        return (before + rows) // self.interval * self.interval - before


@dataclass(frozen=True)
class VerifiedRows:
    """The rows of one verification in all recurrent layers. Called with [bs] lengths, it advances the states.

    A captured verification has one of its own, whose tensors stay where they are.

    Attributes:
        rows: which rows a request has, and the slot of its states.
        pools: the states.
        recorded: what the rows bring.
        tracks: None if no states from the middle of a text are kept.
        layers: SGLang's layers by their index in the pools.
    """

    rows: StateRows
    pools: StatePools
    recorded: RecordedRows
    tracks: Tracks | None
    layers: dict[int, RadixLinearAttention] = field(default_factory=dict)

    def outputs(
        self, index: int, layer: RadixLinearAttention, mixed_qkv: torch.Tensor, a: torch.Tensor, b: torch.Tensor
    ) -> torch.Tensor:
        """Return [N, HV, V] of one layer, and leave its states alone.

        Args:
            index: of the layer, in the pools.
            layer: SGLang's.
            mixed_qkv: [N, C] queries, keys and values before the convolution.
            a: [N, HV], of the decay.
            b: [N, HV], of the strength of the update.
        """
        recorded = RecordedRows(*(part[index] for part in vars(self.recorded).values()))
        for kept, given in ((recorded.inputs, mixed_qkv), (recorded.a, a), (recorded.b, b)):
            assert kept.dtype == given.dtype, "what is replayed was rounded"
            kept.copy_(given)
        self.layers[index] = layer
        windows = self.pools.windows[index]
        causal_conv_rows(mixed_qkv, layer.conv_weights, layer.bias, windows, self.rows, recorded.convolved)
        queries = recorded.convolved[:, : layer.q_dim].unflatten(1, (layer.num_q_heads, -1))
        gates = DeltaGates(layer.A_log, layer.dt_bias)
        return gated_delta(queries, _inputs(layer, recorded), gates, self.pools.states[index], self.rows)

    def __call__(self, lengths: torch.Tensor) -> None:
        """Advance the states by the first rows of each request; requests behind those given have no rows.

        Args:
            lengths: [bs] int, the anchor and the accepted drafts.
        """
        bs = len(lengths)
        tracked = () if self.tracks is None else (self.tracks.lengths(lengths), self.tracks.slots[:bs])
        rows = ReplayedRows(self.rows.indptr[: bs + 1], self.rows.slots[:bs], lengths, *tracked)
        layers = [self.layers[index] for index in range(len(self.pools.states))]
        commit_gated_delta(_inputs(layers[0], self.recorded), _gates(layers), self.pools.states, rows)
        commit_conv_windows(self.recorded.inputs, self.pools.windows, rows)


def _inputs(layer: RadixLinearAttention, recorded: RecordedRows) -> DeltaInputs:
    """Return the inputs to the states, of one layer or of all."""
    _, keys, values = recorded.convolved.split([layer.q_dim, layer.k_dim, layer.v_dim], dim=-1)
    keys, values = keys.unflatten(-1, (layer.num_k_heads, -1)), values.unflatten(-1, (layer.num_v_heads, -1))
    return DeltaInputs(keys, values, recorded.a, recorded.b)


def _gates(layers: Sequence[RadixLinearAttention]) -> DeltaGates:
    """Return the weights of all layers' decays."""
    return DeltaGates(torch.stack([layer.A_log for layer in layers]), torch.stack([layer.dt_bias for layer in layers]))
