"""The gated delta rule over the ragged rows of a verification (arXiv 2412.06464; Qwen3-Next and Qwen3.5 to 3.8).

A value head has a state S [V, K]. A row brings v [V], q and k [K] of the key head that serves its group of value heads,
and two numbers, a and b:

    S <- exp(-exp(A_log) * softplus(a + dt_bias)) * S
    S <- S + sigmoid(b) * (v - S k) k^T
    out = S q / sqrt(K)                                                q and k of length 1

Verification runs all rows and stores no state. The commit replays the accepted rows from their k, v, a and b, of all
layers in one launch, with the same arithmetic. Everything is float32, except what SGLang's decode rounds too:
sigmoid(b) to the dtype of b, and the state to the dtype of its pool after each row.

Bytes: a state of HV * V * K elements is read by verification, and read and written by the commit: three transfers
whatever the number of rows n. Snapshots of every row take n + 3: with n 8, and the rows' inputs in both, over three
times as many bytes. No time was measured yet.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton

from dspark_kernels.dispatch import on_kernels
from dspark_kernels.recurrence.causal_conv_rows import ReplayedRows, StateRows
from dspark_kernels.recurrence.gated_delta_kernels import commit_gated_delta_kernel, gated_delta_kernel


@dataclass(frozen=True)
class DeltaInputs:
    """The inputs of rows to the state of a layer; in a commit of L layers, stacked along a dimension in front.

    Heads of a row lie side by side; rows may lie apart, as parts of wider ones do. Any floating-point dtypes.

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
    """Weights of a layer's decay; in a commit of L layers, stacked along a dimension in front. Contiguous.

    Attributes:
        a_log: [HV].
        dt_bias: [HV].
    """

    a_log: torch.Tensor
    dt_bias: torch.Tensor


def check(inputs: DeltaInputs, gates: DeltaGates, states: torch.Tensor, q: torch.Tensor | None = None) -> None:
    """Compare shapes and layouts with those that the kernels read.

    Args:
        inputs: of the rows, of one layer or of L.
        gates: likewise.
        states: pool of one layer, or pools of L.
        q: of verified rows.

    Raises:
        ValueError: shapes that do not fit together, or parts that do not lie side by side.
    """
    *leading, num_heads, value_dim = inputs.v.shape
    num_key_heads, key_dim = inputs.k.shape[-2:]
    layers = leading[:-1]
    per_head, keys = [*leading, num_heads], [*leading, num_key_heads, key_dim]
    expected = [
        ("k", inputs.k, keys, 2),
        ("v", inputs.v, [*per_head, value_dim], 2),
        ("a", inputs.a, per_head, 1),
        ("b", inputs.b, per_head, 1),
        ("a_log", gates.a_log, [*layers, num_heads], len(layers) + 1),
        ("dt_bias", gates.dt_bias, [*layers, num_heads], len(layers) + 1),
        ("states", states, [*layers, states.shape[len(layers)], num_heads, value_dim, key_dim], 3),
        *([] if q is None else [("q", q, keys, 2)]),
    ]
    for name, part, shape, packed in expected:
        if list(part.shape) != shape or num_heads % num_key_heads:
            raise ValueError(
                f"{name} is {list(part.shape)} where k {list(inputs.k.shape)} and v {list(inputs.v.shape)} "
                f"need {shape}, with a multiple of the key heads as value heads"
            )
        # Those in front may have any strides.
        if not torch.empty_strided(part.shape[-packed:], part.stride()[-packed:], device="meta").is_contiguous():
            raise ValueError(f"the last {packed} dimensions of {name} must be contiguous")


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

    Rows are computed one by one: how torch rounds depends on the size of its tensors, and a replay has to
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
    out = torch.empty(inputs.v.shape, dtype=q.dtype, device=q.device)
    parts, sizes = _sizes(inputs)
    gated_delta_kernel[parts, len(rows.slots) + 1](
        q,
        *vars(inputs).values(),
        *vars(gates).values(),
        states,
        out,
        rows.indptr,
        rows.slots,
        q.stride(0),
        *(part.stride(0) for part in vars(inputs).values()),
        states.stride(0),
        len(q),
        q.shape[2] ** -0.5,
        **sizes,
    )
    return out


@on_kernels(commit_gated_delta_ref)
def commit_gated_delta(
    inputs: DeltaInputs,  # of L layers
    gates: DeltaGates,  # of L layers
    states: torch.Tensor,  # [L, pool, HV, V, K]
    rows: ReplayedRows,
) -> None:
    """Advance the states of all layers over the accepted rows, in place; with tracks, store them a second time.

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
    parts, sizes = _sizes(inputs)
    commit_gated_delta_kernel[parts, len(rows.slots), len(states)](
        *vars(inputs).values(),
        *vars(gates).values(),
        states,
        rows.indptr,
        rows.slots,
        rows.lengths,
        rows.track_lengths,
        rows.track_slots,
        *(part.stride(0) for part in (*vars(inputs).values(), states)),
        *(part.stride(1) for part in (*vars(inputs).values(), states)),
        HAS_TRACKS=rows.track_lengths is not None,
        **sizes,
    )


def _sizes(inputs: DeltaInputs) -> tuple[int, dict[str, int]]:
    """Return the parts that the value heads of a request are cut into, and constants of the launches."""
    (num_heads, value_dim), (num_key_heads, key_dim) = inputs.v.shape[-2:], inputs.k.shape[-2:]
    block_v = min(triton.next_power_of_2(value_dim), _VALUES_PER_PROGRAM)
    return triton.cdiv(value_dim, block_v) * num_heads, {
        "HEADS": num_heads,
        "GROUP": num_heads // num_key_heads,
        "KEY_DIM": key_dim,
        "VALUE_DIM": value_dim,
        "BLOCK_K": triton.next_power_of_2(key_dim),
        "BLOCK_V": block_v,
        "num_warps": _WARPS,
    }
