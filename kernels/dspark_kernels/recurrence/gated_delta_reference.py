"""The gated delta rule in plain torch; ``gated_delta.py`` has the formula."""

from __future__ import annotations

import torch

from dspark_kernels.recurrence.gated_delta_inputs import DeltaGates, DeltaInputs
from dspark_kernels.recurrence.rows import ReplayedRows, StateRows

_EPS = 1e-6
_SOFTPLUS_LINEAR = 20.0  # from here on softplus(x) is x


def gated_delta_ref(
    q: torch.Tensor,  # [N, H, K]
    inputs: DeltaInputs,
    gates: DeltaGates,
    states: torch.Tensor,  # [pool, HV, V, K]
    rows: StateRows,
) -> torch.Tensor:
    """Compute the same as :func:`gated_delta` in plain torch."""
    num_heads, head_dim = inputs.v.shape[1], q.shape[2]
    out = q.new_zeros(inputs.v.shape)
    k, v, decay, beta = _operands(inputs, gates)
    q = _unit(q, num_heads) * head_dim**-0.5
    for first, end, slot in rows.with_rows():
        state = states[slot] if slot >= 0 else torch.zeros_like(states[0])
        for row in range(first, end):
            after = _state_after(state, k[row], v[row], decay[row], beta[row])
            out[row] = _times(after, q[row])
            state = after.to(states.dtype)
    return out


def commit_gated_delta_ref(
    inputs: DeltaInputs,  # of L layers
    gates: DeltaGates,  # of L layers
    states: torch.Tensor,  # [L, pool, HV, V, K]
    rows: ReplayedRows,
) -> None:
    """Compute the same as :func:`commit_gated_delta` in plain torch."""
    k, v, decay, beta = _operands(inputs, gates)
    for first, length, slot, tracked in rows.replays():
        state = states[:, slot]
        for row in range(first, first + length):
            after = _state_after(state, k[:, row], v[:, row], decay[:, row], beta[:, row])
            state = after.to(states.dtype)
            if row + 1 - first in tracked:
                states[:, tracked[row + 1 - first]] = state
        states[:, slot] = state


def _operands(inputs: DeltaInputs, gates: DeltaGates) -> tuple[torch.Tensor, ...]:
    """Return k [..., N, HV, K], v [..., N, HV, V], decay and beta [..., N, HV] of the formula, in float32."""
    x = inputs.a.float() + gates.dt_bias.float()[..., None, :]
    softplus = torch.where(x <= _SOFTPLUS_LINEAR, (1.0 + x.exp()).log(), x)
    decay = (-gates.a_log.float().exp()[..., None, :] * softplus).exp()
    beta = inputs.b.float().sigmoid().to(inputs.b.dtype).float()
    return _unit(inputs.k, inputs.v.shape[-2]), inputs.v.float(), decay, beta


def _unit(x: torch.Tensor, num_heads: int) -> torch.Tensor:
    """Return the key heads of ``x`` [..., H, K] at length 1, repeated for their value heads: [..., HV, K] float32."""
    x = x.float()
    x = x / (x.square().sum(-1, keepdim=True) + _EPS).sqrt()
    return x.repeat_interleave(num_heads // x.shape[-2], dim=-2)


def _times(state: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    """Return the products [..., V] of states [..., V, K] and vectors [..., K]."""
    return (state * x[..., None, :]).sum(-1)


def _state_after(
    state: torch.Tensor, k: torch.Tensor, v: torch.Tensor, decay: torch.Tensor, beta: torch.Tensor
) -> torch.Tensor:
    """Return the float32 state [..., HV, V, K] that a row makes of the one before it."""
    state = state.float() * decay[..., None, None]
    change = (v - _times(state, k)) * beta[..., None]
    return state + change[..., None] * k[..., None, :]
