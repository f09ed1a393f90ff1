"""The kernels behind ``window_attention``: one attends, the other joins the parts of contexts that were split."""

from __future__ import annotations

import triton
import triton.language as tl

_LOWEST = tl.constexpr(-3.4028234663852886e38)  # of float32


@triton.jit
def _attend_tile(q, k, v, visible, row_max, row_sum, acc, scale):
    """Take one step of the online softmax over a tile of keys; a row may see none, so ``row_max`` is finite."""
    scores = tl.dot(q, tl.trans(k), input_precision="ieee") * scale
    scores = tl.where(visible, scores, float("-inf"))
    new_max = tl.maximum(row_max, tl.max(scores, 1))
    weights = tl.exp(scores - new_max[:, None])
    shrink = tl.exp(row_max - new_max)
    row_sum = row_sum * shrink + tl.sum(weights, 1)
    acc = acc * shrink[:, None] + tl.dot(weights.to(v.dtype), v, input_precision="ieee")
    return new_max, row_sum, acc


@triton.jit
def _pool_rows(slot_ptrs, translation_ptr, mask, TRANSLATES: tl.constexpr):
    """Return the rows of the pools [N] int64 at which the slots behind these pointers lie."""
    slots = tl.load(slot_ptrs, mask=mask, other=0).to(tl.int64)
    if TRANSLATES:
        slots = tl.load(translation_ptr + slots, mask=mask, other=0)
    return slots


@triton.jit
def _attend_context(
    q,
    k_pool_ptr,  # of the K/V head
    v_pool_ptr,
    table,  # slots of the request
    translation_ptr,
    first,
    last,
    oldest,  # [M] position from which on a row sees, with SLIDES
    dims,
    row_max,
    row_sum,
    acc,
    scale,
    SLIDES: tl.constexpr,
    TRANSLATES: tl.constexpr,
    SLOT_SIZE: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """Continue the online softmax over the context's positions ``first..last-1``.

    Slots are read one tile ahead. Where a tile reads its own, Triton 3.6 starts its copies of K and V only after the
    tile before it is computed, and nothing overlaps.
    """
    positions = first + tl.arange(0, BLOCK_N)
    slots = _pool_rows(table + positions, translation_ptr, positions < last, TRANSLATES)
    for begin in range(first, last, BLOCK_N):
        positions = begin + tl.arange(0, BLOCK_N)
        visible = positions < last
        offsets = slots[:, None] * SLOT_SIZE + dims[None, :]
        mask = visible[:, None] & (dims < HEAD_DIM)[None, :]
        k = tl.load(k_pool_ptr + offsets, mask=mask, other=0.0).to(q.dtype)
        v = tl.load(v_pool_ptr + offsets, mask=mask, other=0.0).to(q.dtype)
        following = positions + BLOCK_N
        slots = _pool_rows(table + following, translation_ptr, following < last, TRANSLATES)
        seen = visible[None, :]
        if SLIDES:
            seen = seen & (positions[None, :] >= oldest[:, None])
        row_max, row_sum, acc = _attend_tile(q, k, v, seen, row_max, row_sum, acc, scale)
    return row_max, row_sum, acc


@triton.jit
def _attend_window(
    q,
    k_ptr,  # the K/V head
    v_ptr,
    k_offsets,  # [W] int64, of the request's rows
    v_offsets,
    length,
    index,  # of the query rows in the window
    oldest,  # [M] position from which on a row sees, with SLIDES
    dims,
    row_max,
    row_sum,
    acc,
    scale,
    CAUSAL: tl.constexpr,
    SLIDES: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_W: tl.constexpr,
):
    """Continue the online softmax over the request's own rows."""
    columns = tl.arange(0, BLOCK_W)
    is_column = columns < length
    mask = is_column[:, None] & (dims < HEAD_DIM)[None, :]
    k = tl.load(k_ptr + k_offsets[:, None] + dims[None, :], mask=mask, other=0.0).to(q.dtype)
    v = tl.load(v_ptr + v_offsets[:, None] + dims[None, :], mask=mask, other=0.0).to(q.dtype)
    visible = is_column[None, :]
    if CAUSAL:
        visible = visible & (columns[None, :] <= index[:, None])
    if SLIDES:
        visible = visible & (columns[None, :] >= oldest[:, None])
    return _attend_tile(q, k, v, visible, row_max, row_sum, acc, scale)


@triton.jit
def _clear_padding(
    out_ptr,
    indptr_ptr,
    num_rows,
    heads,
    in_share,
    ROW_SIZE: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """Write zeros to a share of the rows of no request, for ``heads`` [M]: what follows computes with them."""
    dims = tl.arange(0, BLOCK_D)
    offsets = heads[:, None] * HEAD_DIM + dims[None, :]
    mask = in_share[:, None] & (dims < HEAD_DIM)[None, :]
    zeros = tl.zeros(offsets.shape, out_ptr.dtype.element_ty)
    end = tl.load(indptr_ptr + tl.num_programs(0)).to(tl.int32)
    for row in range(end + tl.program_id(0), num_rows, tl.num_programs(0)):
        tl.store(out_ptr + tl.cast(row, tl.int64) * ROW_SIZE + offsets, zeros, mask=mask)


# What changes from step to step must not cause compilations, by its value or by the place of a tensor in memory.
_STEP_POINTERS = ["req_pool_indices_ptr", "prefix_lens_ptr", "indptr_ptr"]


@triton.jit(do_not_specialize=["num_rows"], do_not_specialize_on_alignment=_STEP_POINTERS)
def window_attention_kernel(
    q_ptr,
    k_ptr,  # None with IS_STORED
    v_ptr,
    out_ptr,  # [N, heads, hd]
    parts_ptr,  # [splits, N, heads, hd] float32; this and the next two are None without IS_SPLIT
    lse_ptr,  # [splits, N, heads] float32
    used_ptr,  # [N] int32
    k_pool_ptr,
    v_pool_ptr,
    req_to_token_ptr,
    req_pool_indices_ptr,
    prefix_lens_ptr,
    indptr_ptr,
    translation_ptr,  # [slots] int64, None without TRANSLATES
    sinks_ptr,  # [heads], None without HAS_SINKS
    q_stride,
    k_stride,
    v_stride,
    table_stride,
    num_rows,
    scale,
    NUM_KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,  # query heads per K/V head
    HEAD_DIM: tl.constexpr,
    CAUSAL: tl.constexpr,
    SLIDING_WINDOW: tl.constexpr,  # 0: everything is seen
    FROM_ANCHOR: tl.constexpr,  # the sliding window is that of the anchor for all rows
    TRANSLATES: tl.constexpr,  # the pools number their rows themselves
    HAS_SINKS: tl.constexpr,
    IS_SPLIT: tl.constexpr,
    IS_STORED: tl.constexpr,  # the pools hold the window too
    TILES_PER_SPLIT: tl.constexpr,  # of the context, that are worth a program of their own
    SHARE: tl.constexpr,  # heads of a group that a program takes
    BLOCK_H: tl.constexpr,  # >= SHARE
    BLOCK_M: tl.constexpr,  # >= SHARE times the most rows of a request
    BLOCK_W: tl.constexpr,  # >= the most rows of a request
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,  # >= HEAD_DIM
) -> None:
    """Grid (bs, K/V heads times shares of their groups, splits): a program's query rows are all of the request's.

    A request uses as many splits as its context has work for; if that is one, ``out_ptr`` gets its rows. Else
    ``parts_ptr`` gets its parts. ``used_ptr`` gets the number, for every row.
    """
    shares: tl.constexpr = (GROUP + SHARE - 1) // SHARE
    request = tl.program_id(0)
    kv_head = tl.program_id(1) // shares
    first_head = tl.program_id(1) % shares * SHARE
    split = tl.program_id(2)
    if not IS_SPLIT:
        of_share = tl.arange(0, BLOCK_H)
        in_share = (of_share < SHARE) & (first_head + of_share < GROUP)
        row_size: tl.constexpr = NUM_KV_HEADS * GROUP * HEAD_DIM
        heads = kv_head * GROUP + first_head + of_share
        _clear_padding(out_ptr, indptr_ptr, num_rows, heads, in_share, row_size, HEAD_DIM, BLOCK_D)
    start = tl.load(indptr_ptr + request).to(tl.int64)
    length = (tl.load(indptr_ptr + request + 1) - start).to(tl.int32)
    prefix = tl.load(prefix_lens_ptr + request).to(tl.int32)
    begin = 0
    if SLIDING_WINDOW > 0:
        # A window that slides counts its row.
        reach: tl.constexpr = SLIDING_WINDOW if FROM_ANCHOR else SLIDING_WINDOW - 1
        begin = tl.maximum(prefix - reach, 0)
    tiles = tl.cdiv(prefix - begin, BLOCK_N)
    used = tl.full([], 1, tl.int32)
    if IS_SPLIT:
        used = tl.minimum(tl.maximum(tl.cdiv(tiles, TILES_PER_SPLIT), 1), tl.num_programs(2))
    if (length > 0) & (split < used):
        dims = tl.arange(0, BLOCK_D)
        in_head = dims < HEAD_DIM
        rows = tl.arange(0, BLOCK_M)
        in_group = first_head + rows % SHARE
        is_row = (rows // SHARE < length) & (in_group < GROUP)
        # Rows past the request's end stand where its last one does, so that they see something.
        index = tl.minimum(rows // SHARE, length - 1)
        head = kv_head * GROUP + in_group
        row_heads = (start + index) * (NUM_KV_HEADS * GROUP) + head
        q_mask = is_row[:, None] & in_head[None, :]
        q_offsets = (start + index) * q_stride + head * HEAD_DIM
        q = tl.load(q_ptr + q_offsets[:, None] + dims[None, :], mask=q_mask, other=0.0)

        # Finite, so that a row which sees no key of a tile keeps what it has.
        row_max = tl.full([BLOCK_M], _LOWEST, tl.float32)
        row_sum = tl.zeros([BLOCK_M], tl.float32)
        if HAS_SINKS:
            # A sink is a score without a value, which one of the splits counts.
            sink = tl.load(sinks_ptr + head, mask=is_row, other=0.0).to(tl.float32)
            row_max = tl.where(split == 0, sink, row_max)
            row_sum = tl.where(split == 0, row_sum + 1.0, row_sum)
        acc = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)

        slides: tl.constexpr = SLIDING_WINDOW > 0 and not FROM_ANCHOR
        oldest = prefix + index - SLIDING_WINDOW + 1
        # Whole tiles per split, so that only the last one is ragged.
        per_split = tl.cdiv(tiles, used) * BLOCK_N
        first = begin + split * per_split
        last = tl.minimum(first + per_split, prefix)

        table = req_to_token_ptr + tl.load(req_pool_indices_ptr + request).to(tl.int64) * table_stride
        slot_size: tl.constexpr = NUM_KV_HEADS * HEAD_DIM
        k_pool_ptr += kv_head * HEAD_DIM
        v_pool_ptr += kv_head * HEAD_DIM
        row_max, row_sum, acc = _attend_context(
            q,
            k_pool_ptr,
            v_pool_ptr,
            table,
            translation_ptr,
            first,
            last,
            oldest,
            dims,
            row_max,
            row_sum,
            acc,
            scale,
            slides,
            TRANSLATES,
            slot_size,
            HEAD_DIM,
            BLOCK_N,
        )
        if split == 0:
            columns = tl.arange(0, BLOCK_W)
            if IS_STORED:
                slots = _pool_rows(table + prefix + columns, translation_ptr, columns < length, TRANSLATES)
                k_window_ptr, v_window_ptr = k_pool_ptr, v_pool_ptr
                k_offsets, v_offsets = slots * slot_size, slots * slot_size
            else:
                k_window_ptr, v_window_ptr = k_ptr + kv_head * HEAD_DIM, v_ptr + kv_head * HEAD_DIM
                k_offsets, v_offsets = (start + columns) * k_stride, (start + columns) * v_stride
            row_max, row_sum, acc = _attend_window(
                q,
                k_window_ptr,
                v_window_ptr,
                k_offsets,
                v_offsets,
                length,
                index,
                oldest - prefix,
                dims,
                row_max,
                row_sum,
                acc,
                scale,
                CAUSAL,
                slides,
                HEAD_DIM,
                BLOCK_W,
            )

        # A split without a key has sum 0: its part is 0 with a weight of exp(-inf).
        out = acc / tl.where(row_sum > 0, row_sum, 1.0)[:, None]
        out_offsets = row_heads[:, None] * HEAD_DIM + dims[None, :]
        tl.store(out_ptr + out_offsets, out.to(out_ptr.dtype.element_ty), mask=q_mask & (used == 1))
        if IS_SPLIT:
            # As a weighted part if other programs have the rest of the context.
            is_part = used > 1
            lse = tl.where(row_sum > 0, row_max + tl.log(tl.where(row_sum > 0, row_sum, 1.0)), float("-inf"))
            part = row_heads + split * num_rows * (NUM_KV_HEADS * GROUP)
            tl.store(parts_ptr + part[:, None] * HEAD_DIM + dims[None, :], out, mask=q_mask & is_part)
            tl.store(lse_ptr + part, lse, mask=is_row & is_part)
            # Programs of other heads write the same number: cheaper than finding out which one should.
            tl.store(used_ptr + start + index, tl.zeros([BLOCK_M], tl.int32) + used, mask=is_row & (split == 0))


@triton.jit(do_not_specialize=["num_row_heads"], do_not_specialize_on_alignment=["last_ptr"])
def combine_kernel(
    parts_ptr,  # [splits, N, heads, hd] float32
    lse_ptr,  # [splits, N, heads] float32
    out_ptr,  # [N, heads, hd]
    used_ptr,  # [N] int32, splits of the row's request
    num_row_heads,
    last_ptr,  # the end of indptr: rows from there on belong to no request
    NUM_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_S: tl.constexpr,  # splits at a time
    BLOCK_D: tl.constexpr,
) -> None:
    """Grid (N * heads,): the parts of a row and head, joined if there are several; 0 in rows of no request."""
    row_head = tl.program_id(0).to(tl.int64)
    row = row_head // NUM_HEADS
    used = tl.load(used_ptr + row, mask=row < tl.load(last_ptr), other=0)
    if used != 1:  # else the rows are written
        dims = tl.arange(0, BLOCK_D)
        in_head = dims < HEAD_DIM
        out = tl.zeros([BLOCK_D], tl.float32)
        if used > 1:
            largest, total = tl.full([], _LOWEST, tl.float32), tl.zeros([], tl.float32)
            for first in range(0, used, BLOCK_S):
                split = first + tl.arange(0, BLOCK_S)
                is_split = split < used
                offsets = split * num_row_heads + row_head
                lse = tl.load(lse_ptr + offsets, mask=is_split, other=float("-inf"))
                before, largest = largest, tl.maximum(largest, tl.max(lse, 0))
                scaled, weights = tl.exp(before - largest), tl.exp(lse - largest)
                mask = is_split[:, None] & in_head[None, :]
                parts = tl.load(parts_ptr + offsets[:, None] * HEAD_DIM + dims[None, :], mask=mask, other=0.0)
                out = out * scaled + tl.sum(parts * weights[:, None], 0)
                total = total * scaled + tl.sum(weights, 0)
            out /= total
        tl.store(out_ptr + row_head * HEAD_DIM + dims, out.to(out_ptr.dtype.element_ty), mask=in_head)
