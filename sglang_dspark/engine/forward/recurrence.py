"""Gated delta nets over ragged rows in plain torch: one state and one window of the convolution for each request.

A value head of a layer has a state S [V, K], and a row of it does

    S <- exp(-exp(A_log) * softplus(a + dt_bias)) * S
    S <- S + sigmoid(b) * (v - S k) k^T
    out = S q / sqrt(K)                                                q and k of length 1

A row of the convolution reads the inputs of as many rows before it as the window holds. Every row is computed by itself
and in the same way, whatever else is in the batch: a replay gives the same bits.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

import torch
from torch.nn.functional import silu, softplus

_EPS = 1e-6


@dataclass(frozen=True)
class DeltaInputs:
    """What rows bring to the states of a layer.

    Attributes:
        k: [N, H, K].
        v: [N, HV, V]; HV is a multiple of H.
        a: [N, HV], of the decay.
        b: [N, HV], of the strength of the update.
    """

    k: torch.Tensor
    v: torch.Tensor
    a: torch.Tensor
    b: torch.Tensor


@dataclass(frozen=True)
class DeltaGates:
    """Weights of a layer's decay.

    Attributes:
        a_log: [HV].
        dt_bias: [HV].
    """

    a_log: torch.Tensor
    dt_bias: torch.Tensor


@dataclass(frozen=True)
class StateRows:
    """Ragged rows, and the slots in which requests have states and windows.

    Attributes:
        indptr: [bs + 1] int, first row of each request.
        slots: [bs] int.
    """

    indptr: torch.Tensor
    slots: torch.Tensor

    def of_requests(self) -> list[tuple[int, int, int]]:
        """Return slot, first row and end of each request."""
        return [(slot, *rows) for slot, rows in zip(self.slots.tolist(), pairwise(self.indptr.tolist()), strict=True)]


@dataclass(frozen=True)
class ReplayedRows(StateRows):
    """What a commit runs again: of each request the rows that were accepted.

    Attributes:
        lengths: [bs] int, the anchor and the accepted drafts.
    """

    lengths: torch.Tensor

    def replays(self) -> list[tuple[int, int, int]]:
        """Return slot, first row and number of rows of each request."""
        counted = zip(self.of_requests(), self.lengths.tolist(), strict=True)
        return [(slot, begin, length) for (slot, begin, _), length in counted]


def gated_delta(
    q: torch.Tensor, inputs: DeltaInputs, gates: DeltaGates, states: torch.Tensor, rows: StateRows
) -> torch.Tensor:
    """Run all rows from the requests' states, and store none.

    Args:
        q: [N, H, K].
        states: [slots, HV, V, K].

    Returns:
        [N, HV, V] in q's dtype.
    """
    out = q.new_zeros(inputs.v.shape)
    for slot, begin, end in rows.of_requests():
        state = states[slot]
        for row in range(begin, end):
            state = _after_row(state, inputs, gates, row)
            out[row] = _times(state.float(), _unit(q[row], len(gates.a_log))) * q.shape[-1] ** -0.5
    return out


def commit_gated_delta(inputs: DeltaInputs, gates: DeltaGates, states: torch.Tensor, rows: ReplayedRows) -> None:
    """Advance the states of all layers by the accepted rows, in place.

    Args:
        inputs: of L layers, stacked along a dimension in front; gates likewise.
        states: [L, slots, HV, V, K].
    """
    for layer, pool in enumerate(states):
        own_inputs = DeltaInputs(*(part[layer] for part in vars(inputs).values()))
        own_gates = DeltaGates(*(part[layer] for part in vars(gates).values()))
        for slot, begin, length in rows.replays():
            state = pool[slot]
            for row in range(begin, begin + length):
                state = _after_row(state, own_inputs, own_gates, row)
            pool[slot] = state


def _after_row(state: torch.Tensor, inputs: DeltaInputs, gates: DeltaGates, row: int) -> torch.Tensor:
    """Return the state [HV, V, K] after this row, computed in float32 and rounded to the dtype of ``state``."""
    k, strength = _unit(inputs.k[row], len(gates.a_log)), inputs.b[row].float().sigmoid()
    decay = (-gates.a_log.float().exp() * softplus(inputs.a[row].float() + gates.dt_bias.float())).exp()
    decayed = state.float() * decay[:, None, None]
    update = (inputs.v[row].float() - _times(decayed, k)) * strength[:, None]
    return (decayed + update[..., None] * k[:, None, :]).to(state.dtype)


def _unit(vectors: torch.Tensor, num_heads: int) -> torch.Tensor:
    """Return [num_heads, K] float32 of length 1, each head of ``vectors`` [H, K] for as many in a row."""
    vectors = vectors.float()
    vectors = vectors / (vectors.square().sum(-1, keepdim=True) + _EPS).sqrt()
    return vectors.repeat_interleave(num_heads // len(vectors), dim=0)


def _times(state: torch.Tensor, vector: torch.Tensor) -> torch.Tensor:
    """Return [HV, V] products of a state [HV, V, K] and a vector [HV, K]."""
    return (state * vector[:, None, :]).sum(-1)


def causal_conv_rows(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, windows: torch.Tensor, rows: StateRows
) -> torch.Tensor:
    """Convolve each row with those before it, apply SiLU, and leave the windows alone.

    Args:
        x: [N, C]. What later rows see of a row has the windows' dtype, as when it comes from a window.
        weight: [C, W].
        bias: [C].
        windows: [slots, C, W - 1].

    Returns:
        [N, C].
    """
    out = torch.empty_like(x)
    width = weight.shape[1]
    for slot, begin, end in rows.of_requests():
        seen = _seen(x[begin:end], windows[slot]).to(x.dtype)
        for row in range(begin, end):
            before = seen[:, row - begin : row - begin + width - 1]
            summed = (before * weight[:, :-1]).sum(1) + x[row] * weight[:, -1]
            out[row] = silu(summed if bias is None else summed + bias)
    return out


def commit_conv_windows(x: torch.Tensor, windows: torch.Tensor, rows: ReplayedRows) -> None:
    """Move the windows of all layers on by the accepted rows, in place.

    Args:
        x: [L, N, C].
        windows: [L, slots, C, W - 1].
    """
    for inputs, pool in zip(x, windows, strict=True):
        for slot, begin, length in rows.replays():
            pool[slot] = _seen(inputs[begin : begin + length], pool[slot])[:, length:]


def _seen(x: torch.Tensor, window: torch.Tensor) -> torch.Tensor:
    """Return [C, W - 1 + n], a window and the n rows behind it."""
    return torch.cat([window, x.T.to(window.dtype)], dim=1)
