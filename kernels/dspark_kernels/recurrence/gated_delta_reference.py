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
    for first, end, slot in rows.with_rows():
        state = states[slot] if slot >= 0 else torch.zeros_like(states[0])
        for row in range(first, end):
            after = _after_row(state, inputs, gates, row)
            out[row] = _times(after, _unit(q[row], num_heads) * head_dim**-0.5)
            state = after.to(states.dtype)
    return out


def commit_gated_delta_ref(
    inputs: DeltaInputs,  # of L layers
    gates: DeltaGates,  # of L layers
    states: torch.Tensor,  # [L, pool, HV, V, K]
    rows: ReplayedRows,
) -> None:
    """Compute the same as :func:`commit_gated_delta` in plain torch."""
    for layer, pool in enumerate(states):
        own_inputs = DeltaInputs(*(part[layer] for part in vars(inputs).values()))
        own_gates = DeltaGates(*(part[layer] for part in vars(gates).values()))
        for first, length, slot, tracked in rows.replays():
            state = pool[slot]
            for row in range(first, first + length):
                state = _after_row(state, own_inputs, own_gates, row).to(pool.dtype)
                if row + 1 - first in tracked:
                    pool[tracked[row + 1 - first]] = state
            pool[slot] = state


def _after_row(state: torch.Tensor, inputs: DeltaInputs, gates: DeltaGates, row: int) -> torch.Tensor:
    """Return the float32 state [HV, V, K] that a row of one layer makes of the one before it.

    Rows are computed one by one: torch's elementwise functions round by the size of their tensors, and a replay has to
    give the same bits whatever else is in the batch.
    """
    x = inputs.a[row].float() + gates.dt_bias.float()
    softplus = torch.where(x <= _SOFTPLUS_LINEAR, (1.0 + x.exp()).log(), x)
    decay = (-gates.a_log.float().exp() * softplus).exp()
    beta = inputs.b[row].float().sigmoid().to(inputs.b.dtype).float()
    k = _unit(inputs.k[row], len(beta))
    decayed = state.float() * decay[:, None, None]
    change = (inputs.v[row].float() - _times(decayed, k)) * beta[:, None]
    return decayed + change[..., None] * k[:, None, :]


def _unit(x: torch.Tensor, num_heads: int) -> torch.Tensor:
    """Return the key heads of ``x`` [H, K] at length 1, repeated for their value heads: [HV, K] float32."""
    x = x.float()
    x = x / (x.square().sum(-1, keepdim=True) + _EPS).sqrt()
    return x.repeat_interleave(num_heads // len(x), dim=0)


def _times(state: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    """Return the products [HV, V] of states [HV, V, K] and vectors [HV, K]."""
    return (state * x[:, None, :]).sum(-1)
