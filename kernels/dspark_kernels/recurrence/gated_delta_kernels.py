"""Triton kernels of the gated delta rule; ``recurrence/gated_delta.py`` has the formula, and launches them."""

import triton
import triton.language as tl

# Parts of buffers of a captured step: no alignment may cause a compilation of its own.
_ROW_POINTERS = ["indptr_ptr", "slots_ptr", "lengths_ptr", "track_lengths_ptr", "track_slots_ptr"]


@triton.jit
def _unit_length(x):
    return x / tl.sqrt(tl.sum(x * x) + 1e-6)


@triton.jit
def _after_row(
    state,  # [BLOCK_V, BLOCK_K] float32
    k_ptr,  # of the row and its key head
    v_ptr,  # of the row and the value head, as all below
    a_ptr,
    b_ptr,
    a_log_ptr,
    dt_bias_ptr,
    keys,
    values,
    KEY_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
):
    k = _unit_length(tl.load(k_ptr + keys, mask=keys < KEY_DIM, other=0.0).to(tl.float32))
    v = tl.load(v_ptr + values, mask=values < VALUE_DIM, other=0.0).to(tl.float32)
    x = tl.load(a_ptr).to(tl.float32) + tl.load(dt_bias_ptr).to(tl.float32)
    softplus = tl.where(x <= 20.0, tl.log(1.0 + tl.exp(x)), x)
    b = tl.load(b_ptr)
    beta = tl.sigmoid(b.to(tl.float32)).to(b.dtype).to(tl.float32)
    state *= tl.exp(-tl.exp(tl.load(a_log_ptr).to(tl.float32)) * softplus)
    change = (v - tl.sum(state * k[None, :], 1)) * beta
    return state + change[:, None] * k[None, :]


@triton.jit(do_not_specialize=["num_rows"], do_not_specialize_on_alignment=_ROW_POINTERS)
def gated_delta_kernel(
    q_ptr,
    k_ptr,
    v_ptr,
    a_ptr,
    b_ptr,
    a_log_ptr,
    dt_bias_ptr,
    states_ptr,
    out_ptr,
    indptr_ptr,
    slots_ptr,
    q_stride,
    k_stride,
    v_stride,
    a_stride,
    b_stride,
    slot_stride,
    num_rows,
    scale,
    HEADS: tl.constexpr,
    GROUP: tl.constexpr,  # value heads of a key head
    KEY_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    BLOCK_K: tl.constexpr,  # >= KEY_DIM
    BLOCK_V: tl.constexpr,
) -> None:
    """Write the outputs of one request's rows for a part of a value head; the last program clears rows of padding."""
    request = tl.program_id(1)
    parts: tl.constexpr = (VALUE_DIM + BLOCK_V - 1) // BLOCK_V
    head = tl.program_id(0) // parts
    values = tl.program_id(0) % parts * BLOCK_V + tl.arange(0, BLOCK_V)
    keys = tl.arange(0, BLOCK_K)
    in_head = values < VALUE_DIM
    first = tl.load(indptr_ptr + request).to(tl.int64)
    out_ptr += head * VALUE_DIM + values
    if request == tl.num_programs(1) - 1:
        for row in range(first, num_rows):
            nothing = tl.zeros([BLOCK_V], dtype=out_ptr.dtype.element_ty)
            tl.store(out_ptr + row * (HEADS * VALUE_DIM), nothing, mask=in_head)
    else:
        end = tl.load(indptr_ptr + request + 1).to(tl.int64)
        slot = tl.load(slots_ptr + request).to(tl.int64)
        tile = head * (VALUE_DIM * KEY_DIM) + values[:, None] * KEY_DIM + keys[None, :]
        in_tile = in_head[:, None] & (keys < KEY_DIM)[None, :]
        # A request slot of a captured step that nobody has costs nothing, whatever its slot is.
        is_read = in_tile & (slot >= 0) & (first < end)
        stored = tl.load(states_ptr + slot * slot_stride + tile, mask=is_read, other=0.0)
        state = stored.to(tl.float32)
        for row in range(first, end):
            state = _after_row(
                state,
                k_ptr + row * k_stride + head // GROUP * KEY_DIM,
                v_ptr + row * v_stride + head * VALUE_DIM,
                a_ptr + row * a_stride + head,
                b_ptr + row * b_stride + head,
                a_log_ptr + head,
                dt_bias_ptr + head,
                keys,
                values,
                KEY_DIM,
                VALUE_DIM,
            )
            q_row = q_ptr + row * q_stride + head // GROUP * KEY_DIM
            q = _unit_length(tl.load(q_row + keys, mask=keys < KEY_DIM, other=0.0).to(tl.float32)) * scale
            out = tl.sum(state * q[None, :], 1)
            tl.store(out_ptr + row * (HEADS * VALUE_DIM), out.to(out_ptr.dtype.element_ty), mask=in_head)
            state = state.to(stored.dtype).to(tl.float32)


# Distances of layers depend on the rows of a step.
@triton.jit(do_not_specialize=["a_layer", "b_layer"], do_not_specialize_on_alignment=_ROW_POINTERS)
def commit_gated_delta_kernel(
    k_ptr,
    v_ptr,
    a_ptr,
    b_ptr,
    a_log_ptr,
    dt_bias_ptr,
    states_ptr,
    indptr_ptr,
    slots_ptr,
    lengths_ptr,
    track_lengths_ptr,
    track_slots_ptr,
    k_layer,
    v_layer,
    a_layer,
    b_layer,
    states_layer,
    k_stride,
    v_stride,
    a_stride,
    b_stride,
    slot_stride,
    HAS_TRACKS: tl.constexpr,
    HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    KEY_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_V: tl.constexpr,
) -> None:
    """Advance a part of the state of one value head of a request and a layer."""
    request = tl.program_id(1)
    layer = tl.program_id(2).to(tl.int64)
    parts: tl.constexpr = (VALUE_DIM + BLOCK_V - 1) // BLOCK_V
    head = tl.program_id(0) // parts
    values = tl.program_id(0) % parts * BLOCK_V + tl.arange(0, BLOCK_V)
    keys = tl.arange(0, BLOCK_K)
    first = tl.load(indptr_ptr + request).to(tl.int64)
    slot = tl.load(slots_ptr + request).to(tl.int64)
    rows_of_request = tl.load(indptr_ptr + request + 1).to(tl.int64) - first
    length = tl.minimum(tl.load(lengths_ptr + request).to(tl.int64), rows_of_request)
    if (slot >= 0) & (length > 0):
        if HAS_TRACKS:
            track_slot = tl.load(track_slots_ptr + request).to(tl.int64)
            track_length = tl.load(track_lengths_ptr + request).to(tl.int64)
        tile = head * (VALUE_DIM * KEY_DIM) + values[:, None] * KEY_DIM + keys[None, :]
        in_tile = (values < VALUE_DIM)[:, None] & (keys < KEY_DIM)[None, :]
        tile_ptr = states_ptr + layer * states_layer + tile
        state = tl.load(tile_ptr + slot * slot_stride, mask=in_tile, other=0.0).to(tl.float32)
        dtype = states_ptr.dtype.element_ty
        for row in range(first, first + length):
            state = _after_row(
                state,
                k_ptr + layer * k_layer + row * k_stride + head // GROUP * KEY_DIM,
                v_ptr + layer * v_layer + row * v_stride + head * VALUE_DIM,
                a_ptr + layer * a_layer + row * a_stride + head,
                b_ptr + layer * b_layer + row * b_stride + head,
                a_log_ptr + layer * HEADS + head,
                dt_bias_ptr + layer * HEADS + head,
                keys,
                values,
                KEY_DIM,
                VALUE_DIM,
            )
            state = state.to(dtype).to(tl.float32)
            if HAS_TRACKS:
                tracked = (row + 1 - first == track_length) & (track_slot >= 0)
                tl.store(tile_ptr + track_slot * slot_stride, state.to(dtype), mask=in_tile & tracked)
        tl.store(tile_ptr + slot * slot_stride, state.to(dtype), mask=in_tile)
