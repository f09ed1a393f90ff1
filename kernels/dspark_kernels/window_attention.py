"""Attention of a few query rows per request: over its paged context, and over the window of the rows themselves.

Both forwards of a decode step have this shape. In the draft block every row sees the whole window (Eq. 3), in the
target's verification a row sees the window up to itself. K/V of the window are handed in beside the pool: those of a
draft block are never stored there.

Slots are read from SGLang's ``req_to_token`` table, and lengths from the device: the kernel needs no index list built
for it and no value of the host, so it can be captured in a CUDA graph.

All query heads that share a K/V head, and all rows of a request, are one tile: the context is read once per K/V head,
where a kernel that works head by head reads it once per query head. A group of heads whose tile would be too large is
shared out among programs. Few requests with long contexts would leave most of a GPU idle, so the context is split over
several programs and their parts are combined afterwards (flash-decoding).

Bytes moved: 2 * kv_heads * hd * (context + rows) of K and V, and twice the queries; the floor is that over the memory
bandwidth. With S splits, 8 * S bytes per query element come on top.
"""

from __future__ import annotations

import itertools

import torch
import torch.nn.functional as F
import triton
import triton.language as tl

_MIN_DOT = 16  # smallest tile side of tl.dot
_MAX_SPLITS = 32
_MAX_TILE = 16_384  # elements of a program's queries, beyond which registers and shared memory do not suffice
_FOUR_WARPS_TILE = 4096  # elements that four warps hold in their registers
_WIDE_HEAD = 128  # head dimension beyond which only half as many keys are taken at a time


def window_attention_ref(
    q: torch.Tensor,  # [N, heads, hd]
    k: torch.Tensor,  # [N, kv_heads, hd]
    v: torch.Tensor,  # [N, kv_heads, hd]
    k_pool: torch.Tensor,  # [slots, kv_heads, hd]
    v_pool: torch.Tensor,  # [slots, kv_heads, hd]
    req_to_token: torch.Tensor,  # [rows, columns] int
    req_pool_indices: torch.Tensor,  # [bs] int64
    prefix_lens: torch.Tensor,  # [bs] int64
    indptr: torch.Tensor,  # [bs + 1] int64
    *,
    causal: bool,
    scale: float,
) -> torch.Tensor:
    """The same as :func:`window_attention` in plain torch; rows of no request are zero. Syncs with the host."""
    out = torch.zeros_like(q)
    for request, (start, end) in enumerate(itertools.pairwise(indptr.tolist())):
        if start == end:
            continue
        prefix, rows = int(prefix_lens[request]), end - start
        slots = req_to_token[req_pool_indices[request], :prefix].long()
        keys, values = (
            torch.cat([pool[slots], x[start:end]]).transpose(0, 1) for pool, x in ((k_pool, k), (v_pool, v))
        )
        visible = torch.ones(rows, prefix + rows, dtype=torch.bool, device=q.device)
        if causal:
            visible = visible.tril(prefix)
        attended = F.scaled_dot_product_attention(
            q[start:end].transpose(0, 1)[None],
            keys[None],
            values[None],
            attn_mask=visible,
            scale=scale,
            enable_gqa=True,
        )
        out[start:end] = attended[0].transpose(0, 1)
    return out


@triton.jit
def _attend_tile(q, k, v, visible, row_max, row_sum, acc, scale):
    """One step of the online softmax over a tile of keys; every row has a finite ``row_max`` or sees one of them."""
    scores = tl.dot(q, tl.trans(k), input_precision="ieee") * scale
    scores = tl.where(visible, scores, float("-inf"))
    new_max = tl.maximum(row_max, tl.max(scores, 1))
    weights = tl.exp(scores - new_max[:, None])
    shrink = tl.exp(row_max - new_max)
    row_sum = row_sum * shrink + tl.sum(weights, 1)
    acc = acc * shrink[:, None] + tl.dot(weights.to(v.dtype), v, input_precision="ieee")
    return new_max, row_sum, acc


# What changes from step to step must not cause compilations, by its value or by the place of a tensor in memory.
_STEP_POINTERS = ["req_pool_indices_ptr", "prefix_lens_ptr", "indptr_ptr"]


@triton.jit(do_not_specialize=["num_rows"], do_not_specialize_on_alignment=_STEP_POINTERS)
def _window_attention_kernel(
    q_ptr,
    k_ptr,
    v_ptr,
    out_ptr,  # [N, heads, hd]; with IS_SPLIT [splits, N, heads, hd] float32
    lse_ptr,  # [splits, N, heads] float32, unused without IS_SPLIT
    k_pool_ptr,
    v_pool_ptr,
    req_to_token_ptr,
    req_pool_indices_ptr,
    prefix_lens_ptr,
    indptr_ptr,
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
    IS_SPLIT: tl.constexpr,
    SHARE: tl.constexpr,  # heads of a group that a program takes
    BLOCK_M: tl.constexpr,  # >= SHARE times the most rows of a request
    BLOCK_W: tl.constexpr,  # >= the most rows of a request
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,  # >= HEAD_DIM
):
    # One program per request, share of a K/V head's group, and split; its query rows are the request's rows times the
    # heads of the share.
    shares: tl.constexpr = (GROUP + SHARE - 1) // SHARE
    request = tl.program_id(0)
    kv_head = tl.program_id(1) // shares
    first_head = tl.program_id(1) % shares * SHARE
    split = tl.program_id(2)
    start = tl.load(indptr_ptr + request).to(tl.int64)
    length = (tl.load(indptr_ptr + request + 1) - start).to(tl.int32)
    if length > 0:
        dims = tl.arange(0, BLOCK_D)
        in_head = dims < HEAD_DIM
        rows = tl.arange(0, BLOCK_M)
        place = rows // SHARE
        in_group = first_head + rows % SHARE
        is_row = (place < length) & (in_group < GROUP)
        head = kv_head * GROUP + in_group
        row_heads = (start + place) * (NUM_KV_HEADS * GROUP) + head
        q_mask = is_row[:, None] & in_head[None, :]
        q_offsets = (start + place) * q_stride + head * HEAD_DIM
        q = tl.load(q_ptr + q_offsets[:, None] + dims[None, :], mask=q_mask, other=0.0)

        row_max = tl.full([BLOCK_M], float("-inf"), tl.float32)
        row_sum = tl.zeros([BLOCK_M], tl.float32)
        acc = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)

        prefix = tl.load(prefix_lens_ptr + request).to(tl.int32)
        # Whole tiles per split, so that only the last one is ragged.
        tiles = tl.cdiv(prefix, BLOCK_N)
        per_split = tl.cdiv(tiles, tl.num_programs(2)) * BLOCK_N
        first = split * per_split
        last = tl.minimum(first + per_split, prefix)

        table = req_to_token_ptr + tl.load(req_pool_indices_ptr + request).to(tl.int64) * table_stride
        for begin in range(first, last, BLOCK_N):
            positions = begin + tl.arange(0, BLOCK_N)
            visible = positions < last
            slots = tl.load(table + positions, mask=visible, other=0).to(tl.int64)
            offsets = (slots * NUM_KV_HEADS + kv_head) * HEAD_DIM
            mask = visible[:, None] & in_head[None, :]
            k = tl.load(k_pool_ptr + offsets[:, None] + dims[None, :], mask=mask, other=0.0)
            v = tl.load(v_pool_ptr + offsets[:, None] + dims[None, :], mask=mask, other=0.0)
            row_max, row_sum, acc = _attend_tile(q, k, v, visible[None, :], row_max, row_sum, acc, scale)

        if split == 0:
            columns = tl.arange(0, BLOCK_W)
            is_column = columns < length
            mask = is_column[:, None] & in_head[None, :]
            k_offsets = (start + columns) * k_stride + kv_head * HEAD_DIM
            v_offsets = (start + columns) * v_stride + kv_head * HEAD_DIM
            k = tl.load(k_ptr + k_offsets[:, None] + dims[None, :], mask=mask, other=0.0)
            v = tl.load(v_ptr + v_offsets[:, None] + dims[None, :], mask=mask, other=0.0)
            visible = is_column[None, :]
            if CAUSAL:
                # Column 0 is visible to every row, those past the request's end included.
                visible = visible & (columns[None, :] <= place[:, None])
            row_max, row_sum, acc = _attend_tile(q, k, v, visible, row_max, row_sum, acc, scale)

        if not IS_SPLIT:
            out = acc / row_sum[:, None]
            out_offsets = row_heads[:, None] * HEAD_DIM + dims[None, :]
            tl.store(out_ptr + out_offsets, out.to(out_ptr.dtype.element_ty), mask=q_mask)
        else:
            # A split without a key has sum 0: its part is 0 with a weight of exp(-inf).
            out = acc / tl.where(row_sum > 0, row_sum, 1.0)[:, None]
            lse = tl.where(row_sum > 0, row_max + tl.log(tl.where(row_sum > 0, row_sum, 1.0)), float("-inf"))
            part = row_heads + split * num_rows * (NUM_KV_HEADS * GROUP)
            tl.store(out_ptr + part[:, None] * HEAD_DIM + dims[None, :], out, mask=q_mask)
            tl.store(lse_ptr + part, lse, mask=is_row)


@triton.jit(do_not_specialize=["num_row_heads", "splits"], do_not_specialize_on_alignment=["last_ptr"])
def _combine_kernel(
    parts_ptr,  # [splits, N, heads, hd] float32
    lse_ptr,  # [splits, N, heads] float32
    out_ptr,  # [N, heads, hd]
    num_row_heads,
    splits,
    last_ptr,  # the end of indptr: rows from there on belong to no request
    NUM_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_S: tl.constexpr,  # >= splits
    BLOCK_D: tl.constexpr,
):
    row_head = tl.program_id(0).to(tl.int64)
    if row_head // NUM_HEADS < tl.load(last_ptr):
        split = tl.arange(0, BLOCK_S)
        dims = tl.arange(0, BLOCK_D)
        in_head = dims < HEAD_DIM
        is_split = split < splits
        places = split * num_row_heads + row_head
        lse = tl.load(lse_ptr + places, mask=is_split, other=float("-inf"))
        weights = tl.exp(lse - tl.max(lse, 0))
        mask = is_split[:, None] & in_head[None, :]
        parts = tl.load(parts_ptr + places[:, None] * HEAD_DIM + dims[None, :], mask=mask, other=0.0)
        out = tl.sum(parts * weights[:, None], 0) / tl.sum(weights, 0)
        tl.store(out_ptr + row_head * HEAD_DIM + dims, out.to(out_ptr.dtype.element_ty), mask=in_head)


def window_attention(
    q: torch.Tensor,  # [N, heads, hd]
    k: torch.Tensor,  # [N, kv_heads, hd]
    v: torch.Tensor,  # [N, kv_heads, hd]
    k_pool: torch.Tensor,  # [slots, kv_heads, hd]
    v_pool: torch.Tensor,  # [slots, kv_heads, hd]
    req_to_token: torch.Tensor,  # [rows, columns] int32
    req_pool_indices: torch.Tensor,  # [bs] int64
    prefix_lens: torch.Tensor,  # [bs] int64
    indptr: torch.Tensor,  # [bs + 1] int64
    *,
    width: int,
    causal: bool,
    scale: float,
    splits: int = 1,
) -> torch.Tensor:
    """Attend from every row to its request's context and window.

    Args:
        q, k, v: rows of the windows, request by request, normalised and rotated; float32, float16 or bfloat16. Rows may
            lie apart, as they do in the output of a fused projection.
        k_pool, v_pool: context rows of this layer, contiguous.
        req_to_token: slot of every position of every request; columns ``0..prefix_lens[r]-1`` of row
            ``req_pool_indices[r]`` are read.
        prefix_lens: context length per request; 0 is allowed.
        indptr: first row of each request; a request without rows is allowed, and so are rows past the last request,
            whose output is undefined.
        width: bound on the rows of a request.
        causal: a row sees the window up to itself, not all of it.
        scale: of the scores.
        splits: programs that share a context, at most 32, see :func:`num_splits`.

    Returns:
        [N, heads, hd] in q's dtype; softmax and sums in float32. No host sync; safe under graph capture.

    Raises:
        ValueError: the pool rows are not contiguous.
    """
    if not (k_pool.is_contiguous() and v_pool.is_contiguous()):
        raise ValueError("k_pool and v_pool must be contiguous; pass one layer of a [L, slots, kv_heads, hd] pool")
    q, k, v = (_with_whole_rows(x) for x in (q, k, v))
    num_rows, num_heads, head_dim = q.shape
    num_kv_heads = k.shape[1]
    group = num_heads // num_kv_heads
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    if splits == 1:
        parts, lse = out, out
    else:
        parts = torch.empty((splits, *q.shape), dtype=torch.float32, device=q.device)
        lse = torch.empty((splits, num_rows, num_heads), dtype=torch.float32, device=q.device)
    bs = prefix_lens.shape[0]
    block_d = max(_MIN_DOT, triton.next_power_of_2(head_dim))
    share = _heads_per_program(group, width, block_d)
    block_m = max(_MIN_DOT, triton.next_power_of_2(width * share))
    _window_attention_kernel[(bs, num_kv_heads * triton.cdiv(group, share), splits)](
        q,
        k,
        v,
        parts,
        lse,
        k_pool,
        v_pool,
        req_to_token,
        req_pool_indices,
        prefix_lens,
        indptr,
        q.stride(0),
        k.stride(0),
        v.stride(0),
        req_to_token.stride(0),
        num_rows,
        scale,
        NUM_KV_HEADS=num_kv_heads,
        GROUP=group,
        HEAD_DIM=head_dim,
        CAUSAL=causal,
        IS_SPLIT=splits > 1,
        SHARE=share,
        BLOCK_M=block_m,
        BLOCK_W=max(_MIN_DOT, triton.next_power_of_2(width)),
        BLOCK_N=64 if block_d <= _WIDE_HEAD else 32,
        BLOCK_D=block_d,
        num_warps=4 if block_m * block_d <= _FOUR_WARPS_TILE else 8,
    )
    if splits > 1:
        _combine_kernel[(num_rows * num_heads,)](
            parts,
            lse,
            out,
            num_rows * num_heads,
            splits,
            indptr[-1:],
            NUM_HEADS=num_heads,
            HEAD_DIM=head_dim,
            # Whatever the number of splits, which changes with the batch: the same kernel.
            BLOCK_S=_MAX_SPLITS,
            BLOCK_D=block_d,
        )
    return out


def _heads_per_program(group: int, width: int, block_d: int) -> int:
    """Query heads of a K/V head that share a tile: all of them, unless it were too large."""
    share = group
    while share > 1 and triton.next_power_of_2(width * share) * block_d > _MAX_TILE:
        share = triton.cdiv(share, 2)
    return share


def _with_whole_rows(x: torch.Tensor) -> torch.Tensor:
    return x if x.stride(2) == 1 and x.stride(1) == x.shape[2] else x.contiguous()


def num_splits(bs: int, num_kv_heads: int, num_processors: int) -> int:
    """Splits of the contexts that give every multiprocessor of the GPU about two programs.

    Args:
        bs: requests of the batch.
        num_kv_heads: of one layer on this rank.
        num_processors: multiprocessors of the GPU.
    """
    wanted = 2 * num_processors // max(1, bs * num_kv_heads)
    return max(1, min(_MAX_SPLITS, 1 << (wanted.bit_length() - 1))) if wanted else 1
