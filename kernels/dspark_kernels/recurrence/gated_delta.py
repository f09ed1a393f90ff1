"""The gated delta rule over ragged rows (Gated Delta Networks, arXiv 2412.06464; Qwen3-Next and Qwen3.5 to 3.8).

A value head has a state S [V, K]. A row brings v [V], q and k [K] of the key head that serves its group of value
heads, and two numbers, a and b:

    S <- exp(-exp(A_log) * softplus(a + dt_bias)) * S
    S <- S + sigmoid(b) * (v - S k) k^T
    out = S q / sqrt(K)                                                q and k of length 1

Verification runs all rows and stores no state. The commit replays the accepted rows from their k, v, a and b, of all
layers in one launch, with the same arithmetic. Everything is float32, but for what SGLang's decode rounds too:
sigmoid(b) to the dtype of b, and the state to the dtype of its pool after each row.

Bytes: a state of HV * V * K elements is read by verification, and read and written by the commit: three transfers
whatever the number of rows n. Snapshots of every row take n + 3: with n 8, and the rows' inputs in both, over three
times as many bytes. No time was measured yet.
"""

from __future__ import annotations

import torch
import triton

from dspark_kernels.dispatch import on_kernels
from dspark_kernels.recurrence.gated_delta_inputs import DeltaGates, DeltaInputs, check
from dspark_kernels.recurrence.gated_delta_kernels import commit_gated_delta_kernel, gated_delta_kernel
from dspark_kernels.recurrence.gated_delta_reference import commit_gated_delta_ref, gated_delta_ref
from dspark_kernels.recurrence.rows import ReplayedRows, StateRows

# As SGLang's decode takes them, so that sums over K have the same order.
_VALUES_PER_PROGRAM = 32
_WARPS = 1


@on_kernels(gated_delta_ref)
def gated_delta(
    q: torch.Tensor,  # [N, H, K]
    inputs: DeltaInputs,
    gates: DeltaGates,
    states: torch.Tensor,  # [pool, HV, V, K]
    rows: StateRows,
) -> torch.Tensor:
    """Run all rows of all requests from their states, and store none.

    Args:
        q: of the dtype that comes out; as the inputs are.
        inputs: k, v, a and b of the rows.
        gates: weights of the layer.
        states: pool of the layer, float32 or 16 bits; a slot is contiguous, slots may lie apart.
        rows: the requests' rows and slots.

    Returns:
        [N, HV, V] contiguous in q's dtype, 0 in rows of no request. No host sync; safe under graph capture.

    Raises:
        ValueError: shapes that do not fit together, or a layout that the kernel cannot read.
    """
    check(inputs, gates, states, q)
    num_rows, num_heads, value_dim = inputs.v.shape
    key_dim = q.shape[2]
    out = torch.empty((num_rows, num_heads, value_dim), dtype=q.dtype, device=q.device)
    block_v = min(triton.next_power_of_2(value_dim), _VALUES_PER_PROGRAM)
    gated_delta_kernel[triton.cdiv(value_dim, block_v) * num_heads, len(rows.slots) + 1](
        q,
        inputs.k,
        inputs.v,
        inputs.a,
        inputs.b,
        gates.a_log,
        gates.dt_bias,
        states,
        out,
        rows.indptr,
        rows.slots,
        q.stride(0),
        *(part.stride(0) for part in vars(inputs).values()),
        states.stride(0),
        num_rows,
        key_dim**-0.5,
        HEADS=num_heads,
        GROUP=num_heads // q.shape[1],
        KEY_DIM=key_dim,
        VALUE_DIM=value_dim,
        BLOCK_K=triton.next_power_of_2(key_dim),
        BLOCK_V=block_v,
        num_warps=_WARPS,
    )
    return out


@on_kernels(commit_gated_delta_ref)
def commit_gated_delta(
    inputs: DeltaInputs,  # of L layers
    gates: DeltaGates,  # of L layers
    states: torch.Tensor,  # [L, pool, HV, V, K]
    rows: ReplayedRows,
) -> None:
    """Advance the states of all layers by the accepted rows, in place; with tracks, store them a second time.

    Two requests may not share a slot; what a shared padding slot then holds is undefined. No host sync; safe under
    graph capture.

    Args:
        inputs: k, v, a and b of the rows as they were verified.
        gates: weights of the layers.
        states: pools of the layers, float32 or 16 bits; a slot is contiguous.
        rows: which rows, and where the states lie.

    Raises:
        ValueError: shapes that do not fit together, or a layout that the kernel cannot read.
    """
    check(inputs, gates, states)
    num_layers, _, num_heads, value_dim = inputs.v.shape
    num_key_heads, key_dim = inputs.k.shape[2:]
    block_v = min(triton.next_power_of_2(value_dim), _VALUES_PER_PROGRAM)
    commit_gated_delta_kernel[triton.cdiv(value_dim, block_v) * num_heads, len(rows.slots), num_layers](
        *vars(inputs).values(),
        gates.a_log,
        gates.dt_bias,
        states,
        rows.indptr,
        rows.slots,
        rows.lengths,
        rows.track_lengths,
        rows.track_slots,
        *(part.stride(0) for part in (*vars(inputs).values(), states)),
        *(part.stride(1) for part in (*vars(inputs).values(), states)),
        HAS_TRACKS=rows.track_lengths is not None,
        HEADS=num_heads,
        GROUP=num_heads // num_key_heads,
        KEY_DIM=key_dim,
        VALUE_DIM=value_dim,
        BLOCK_K=triton.next_power_of_2(key_dim),
        BLOCK_V=block_v,
        num_warps=_WARPS,
    )
