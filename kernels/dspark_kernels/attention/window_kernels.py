"""The kernel behind ``window_attention``.

Programs that share a context leave their parts in memory. The last of a group to arrive combines those of the group,
and the last of the groups combines what these have left: with 256 programs none reads more than 32 parts. Parts are
summed in their own order, whichever program is the last one.

With FIXED_SPLIT, tiles and splits begin at multiples of their sizes, counted from the request's first position, and
hold the window too. A row then meets the same keys in the same tiles whatever is computed with it. Tiles in which it
sees nothing, before its own or after them, change no bit of what it has, and neither do parts of nothing: their weights
are exp(-inf) = 0, and that of a single part is exp(0) = 1.
"""

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
def _pool_rows(slot_ptrs, translation_ptr, mask):
    """Return the rows of the pools [N] int64 at which the slots behind these pointers lie."""
    slots = tl.load(slot_ptrs, mask=mask, other=0).to(tl.int64)
    if translation_ptr is not None:
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
    newest,  # [M] last position that a row sees, WITH_WINDOW
    stored_from,  # the first position of which something is read, WITH_WINDOW
    dims,
    row_max,
    row_sum,
    acc,
    scale,
    WITH_WINDOW: tl.constexpr,
    SLIDES: tl.constexpr,
    SLOT_SIZE: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """Continue the online softmax over positions ``first..last-1``: of the context, WITH_WINDOW of the rows too.

    Slots are read one tile ahead. Where a tile reads its own, Triton 3.6 starts its copies of K and V only after the
    tile before it is computed, and nothing overlaps.
    """
    positions = first + tl.arange(0, BLOCK_N)
    # What no row sees may have lost its place in the pool: the first key that one sees stands in for it.
    readable = tl.maximum(positions, stored_from) if WITH_WINDOW else positions
    slots = _pool_rows(table + readable, translation_ptr, positions < last)
    for begin in range(first, last, BLOCK_N):
        positions = begin + tl.arange(0, BLOCK_N)
        visible = positions < last
        offsets = slots[:, None] * SLOT_SIZE + dims[None, :]
        mask = visible[:, None] & (dims < HEAD_DIM)[None, :]
        k = tl.load(k_pool_ptr + offsets, mask=mask, other=0.0).to(q.dtype)
        v = tl.load(v_pool_ptr + offsets, mask=mask, other=0.0).to(q.dtype)
        following = positions + BLOCK_N
        slots = _pool_rows(table + following, translation_ptr, following < last)
        seen = visible[None, :]
        if SLIDES:
            seen = seen & (positions[None, :] >= oldest[:, None])
        if WITH_WINDOW:
            seen = seen & (positions[None, :] <= newest[:, None])
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


@triton.jit
def _combine(
    parts_ptr,
    lse_ptr,
    row_heads,  # [M] int64
    num_row_heads,
    first,  # split whose part is the first one
    stride,  # splits between parts
    members,
    dims,
    mask,  # [M, D]
    is_row,  # [M]
    HEAD_DIM: tl.constexpr,
    FAN: tl.constexpr,
):
    """Return what the parts of up to FAN splits make together, and the logarithm of the sum of its weights."""
    part = tl.arange(0, FAN)
    offsets = (first + part * stride)[:, None] * num_row_heads + row_heads[None, :]
    # Past the L1 cache, which other multiprocessors' stores do not reach.
    there = (part < members)[:, None] & is_row[None, :]
    lse = tl.load(lse_ptr + offsets, mask=there, other=float("-inf"), cache_modifier=".cg")
    largest = tl.maximum(tl.max(lse, 0), _LOWEST)
    total = largest + tl.log(tl.sum(tl.exp(lse - largest[None, :]), 0))
    norm = tl.where(total > float("-inf"), total, 0.0)
    out = tl.zeros(mask.shape, tl.float32)
    for member in range(members):
        at = (first + member * stride) * num_row_heads + row_heads
        # Under way while the weights change their layout, which takes barriers.
        part_ptrs = parts_ptr + at[:, None] * HEAD_DIM + dims[None, :]
        rows = tl.load(part_ptrs, mask=mask, other=0.0, cache_modifier=".cg")
        weight = tl.exp(tl.load(lse_ptr + at, mask=is_row, other=float("-inf"), cache_modifier=".cg") - norm)
        out += weight[:, None] * rows
    return out, total


@triton.jit
def _used_splits(tiles, num_keys, TILES_PER_SPLIT: tl.constexpr, FIXED_SPLIT: tl.constexpr):
    """Return how many splits a request uses."""
    if FIXED_SPLIT > 0:
        return tl.minimum(tl.cdiv(num_keys, FIXED_SPLIT), tl.num_programs(2))
    most = tl.minimum(tiles // TILES_PER_SPLIT, tl.num_programs(2))
    # Whole tiles per split, so that only the last one is ragged.
    return tl.where(tiles < 3 * TILES_PER_SPLIT, 1, tl.cdiv(tiles, tl.cdiv(tiles, tl.maximum(most, 1))))


# What changes from step to step must not cause compilations, through its value or the place of a tensor in memory.
_STEP_POINTERS = ["req_pool_indices_ptr", "prefix_lens_ptr", "indptr_ptr"]


@triton.jit(do_not_specialize=["num_rows"], do_not_specialize_on_alignment=_STEP_POINTERS)
def window_attention_kernel(
    q_ptr,
    k_ptr,  # this and the next are None if the pools hold the window too
    v_ptr,
    out_ptr,  # [N, heads, hd]
    parts_ptr,  # [splits, N, heads, hd] float32; this and the next two are None if no context is split
    lse_ptr,  # [splits, N, heads] float32
    arrivals_ptr,  # [>= tiles, FAN + 1] int32, zeros before the launch and after it
    k_pool_ptr,
    v_pool_ptr,
    req_to_token_ptr,
    req_pool_indices_ptr,
    prefix_lens_ptr,
    indptr_ptr,
    translation_ptr,  # [slots] int64, None if pools number their rows as slots
    sinks_ptr,  # [heads] or None
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
    TILES_PER_SPLIT: tl.constexpr,  # of the context, at least; of fewer than three times as many, there is one split
    FIXED_SPLIT: tl.constexpr,  # keys of a split, tiles of BLOCK_N; 0: as many as suit the context
    SHARE: tl.constexpr,  # heads of a group that a program takes
    BLOCK_H: tl.constexpr,  # >= SHARE
    BLOCK_M: tl.constexpr,  # >= SHARE times the most rows of a request
    BLOCK_W: tl.constexpr,  # >= the most rows of a request
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,  # >= HEAD_DIM
    FAN: tl.constexpr,  # parts that are combined at a time; at most FAN ** 2 splits
) -> None:
    """Grid (bs, K/V heads times shares of their groups, splits): a program's query rows are all of the request's.

    A request uses as many splits as its context has work for, or FIXED_SPLIT cuts it into. If that is one, it writes
    its rows; else the last of its programs to arrive does.
    """
    shares: tl.constexpr = (GROUP + SHARE - 1) // SHARE
    request = tl.program_id(0)
    kv_head = tl.program_id(1) // shares
    first_head = tl.program_id(1) % shares * SHARE
    split = tl.program_id(2)
    if split == 0:
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
    if parts_ptr is not None:
        used = _used_splits(tiles, prefix + length, TILES_PER_SPLIT, FIXED_SPLIT)
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
        if sinks_ptr is not None:
            # A sink is a score without a value, which one of the splits counts.
            sink = tl.load(sinks_ptr + head, mask=is_row, other=0.0).to(tl.float32)
            row_max = tl.where(split == 0, sink, row_max)
            row_sum = tl.where(split == 0, row_sum + 1.0, row_sum)
        acc = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)

        slides: tl.constexpr = SLIDING_WINDOW > 0 and not FROM_ANCHOR
        oldest = prefix + index - SLIDING_WINDOW + 1
        per_split = tl.cdiv(tiles, used) * BLOCK_N
        first = begin + split * per_split
        last = tl.minimum(first + per_split, prefix)
        if FIXED_SPLIT > 0:
            first = begin // BLOCK_N * BLOCK_N + split * FIXED_SPLIT
            last = tl.where(split < used - 1, first + FIXED_SPLIT, prefix + length)

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
            prefix + index,
            begin,
            dims,
            row_max,
            row_sum,
            acc,
            scale,
            FIXED_SPLIT > 0,
            slides,
            slot_size,
            HEAD_DIM,
            BLOCK_N,
        )
        if FIXED_SPLIT == 0 and split == 0:
            columns = tl.arange(0, BLOCK_W)
            if k_ptr is None:
                slots = _pool_rows(table + prefix + columns, translation_ptr, columns < length)
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

        out = acc / tl.where(row_sum > 0, row_sum, 1.0)[:, None]
        is_whole = used == 1
        if parts_ptr is not None:
            # A row that sees no key of a split has a weight of exp(-inf).
            lse = tl.where(row_sum > 0, row_max + tl.log(tl.where(row_sum > 0, row_sum, 1.0)), float("-inf"))
            num_row_heads = num_rows.to(tl.int64) * (NUM_KV_HEADS * GROUP)
            counters = arrivals_ptr + (request * tl.num_programs(1) + tl.program_id(1)) * (FAN + 1)
            stride = 1  # splits that a part stands for
            is_part = used > 1
            while is_part:
                part = split * num_row_heads + row_heads
                tl.store(parts_ptr + part[:, None] * HEAD_DIM + dims[None, :], out, mask=q_mask)
                tl.store(lse_ptr + part, lse, mask=is_row)
                group = split // (stride * FAN)
                members = tl.minimum(tl.cdiv(used, stride) - group * FAN, FAN)
                counter = counters + tl.where(stride == 1, group, FAN)
                # All threads' stores come before the one thread's release; the thread that counts last acquires them.
                tl.debug_barrier()
                is_last = tl.atomic_add(counter, 1, sem="acq_rel", scope="gpu") == members - 1
                if is_last:
                    tl.store(counter, 0)
                    split = group * stride * FAN
                    out, lse = _combine(
                        parts_ptr,
                        lse_ptr,
                        row_heads,
                        num_row_heads,
                        split,
                        stride,
                        members,
                        dims,
                        q_mask,
                        is_row,
                        HEAD_DIM,
                        FAN,
                    )
                    tl.debug_barrier()  # before one of these parts is written over
                    stride *= FAN
                is_whole = is_last & (stride >= used)
                is_part = is_last & (stride < used)
        out_offsets = row_heads[:, None] * HEAD_DIM + dims[None, :]
        tl.store(out_ptr + out_offsets, out.to(out_ptr.dtype.element_ty), mask=q_mask & is_whole)
