"""Attention of a draft block: over the request's paged context and, without a mask, over the block itself (Eq. 3).

The block's own K/V are handed in beside the pool and never stored: only target features of committed tokens enter it.
Slots are read from SGLang's ``req_to_token`` table and lengths from the device, so the kernel needs no index list built
for it and no value of the host; it can be captured in a CUDA graph.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from .ragged_attention import ContextGroup, attend_groups, group_contexts

_MIN_DOT = 16  # smallest tile side of tl.dot
_BLOCK_N = 64


def block_attention_ref(
    q: torch.Tensor,  # [bs * gamma, heads, hd]
    k: torch.Tensor,  # [bs * gamma, kv_heads, hd]
    v: torch.Tensor,  # [bs * gamma, kv_heads, hd]
    k_pool: torch.Tensor,  # [slots, kv_heads, hd]
    v_pool: torch.Tensor,  # [slots, kv_heads, hd]
    req_to_token: torch.Tensor,  # [rows, columns] int
    req_pool_indices: torch.Tensor,  # [bs] int64
    prefix_lens: torch.Tensor,  # [bs] int64
) -> torch.Tensor:
    """The same as :func:`block_attention` in plain torch. Syncs with the host."""
    bs = prefix_lens.shape[0]
    groups = block_groups(
        req_to_token, req_pool_indices, prefix_lens, q.shape[0] // bs, q.shape[1] // k.shape[1], q.dtype
    )
    return attend_groups(q, k_pool, v_pool, groups, q.shape[-1] ** -0.5, extra_kv=(k, v))


def block_groups(
    req_to_token: torch.Tensor,  # [rows, columns] int
    req_pool_indices: torch.Tensor,  # [bs] int64
    prefix_lens: torch.Tensor,  # [bs] int64
    gamma: int,
    heads_per_kv: int,
    dtype: torch.dtype,
) -> list[ContextGroup]:
    """What :func:`block_attention_ref` looks up, the same for all layers of a step. Syncs with the host."""
    return group_contexts(
        req_to_token,
        req_pool_indices.tolist(),
        prefix_lens.tolist(),
        [gamma] * prefix_lens.shape[0],
        causal=False,
        heads_per_kv=heads_per_kv,
        dtype=dtype,
        extra_keys=gamma,
    )


@triton.jit
def _attend_tile(q, k, v, visible, row_max, row_sum, acc, scale):
    """One step of the online softmax over a tile of keys."""
    scores = tl.dot(q, tl.trans(k), input_precision="ieee") * scale
    scores = tl.where(visible[None, :], scores, float("-inf"))
    new_max = tl.maximum(row_max, tl.max(scores, 1))
    weights = tl.exp(scores - new_max[:, None])
    shrink = tl.exp(row_max - new_max)
    row_sum = row_sum * shrink + tl.sum(weights, 1)
    acc = acc * shrink[:, None] + tl.dot(weights.to(v.dtype), v, input_precision="ieee")
    return new_max, row_sum, acc


@triton.jit
def _block_attention_kernel(
    q_ptr,
    k_ptr,
    v_ptr,
    out_ptr,
    k_pool_ptr,
    v_pool_ptr,
    req_to_token_ptr,
    req_pool_indices_ptr,
    prefix_lens_ptr,
    row_stride,
    scale,
    GAMMA: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,  # query heads per K/V head
    HEAD_DIM: tl.constexpr,
    BLOCK_M: tl.constexpr,  # >= GAMMA * GROUP
    BLOCK_G: tl.constexpr,  # >= GAMMA
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,  # >= HEAD_DIM
):
    # One program per request and K/V head; its query rows are the block's rows times the heads of the group.
    request = tl.program_id(0).to(tl.int64)
    kv_head = tl.program_id(1)
    dims = tl.arange(0, BLOCK_D)
    in_head = dims < HEAD_DIM

    rows = tl.arange(0, BLOCK_M)
    is_row = rows < GAMMA * GROUP
    head = kv_head * GROUP + rows % GROUP
    q_offsets = ((request * GAMMA + rows // GROUP) * NUM_KV_HEADS * GROUP + head) * HEAD_DIM
    q_mask = is_row[:, None] & in_head[None, :]
    q = tl.load(q_ptr + q_offsets[:, None] + dims[None, :], mask=q_mask, other=0.0)

    row_max = tl.full([BLOCK_M], float("-inf"), tl.float32)
    row_sum = tl.zeros([BLOCK_M], tl.float32)
    acc = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)

    # The block first: it is never empty, so row_max is finite before any tile whose keys are all masked.
    columns = tl.arange(0, BLOCK_G)
    is_column = columns < GAMMA
    offsets = ((request * GAMMA + columns) * NUM_KV_HEADS + kv_head) * HEAD_DIM
    mask = is_column[:, None] & in_head[None, :]
    k = tl.load(k_ptr + offsets[:, None] + dims[None, :], mask=mask, other=0.0)
    v = tl.load(v_ptr + offsets[:, None] + dims[None, :], mask=mask, other=0.0)
    row_max, row_sum, acc = _attend_tile(q, k, v, is_column, row_max, row_sum, acc, scale)

    table_row = req_to_token_ptr + tl.load(req_pool_indices_ptr + request) * row_stride
    prefix = tl.load(prefix_lens_ptr + request)
    for start in range(0, prefix, BLOCK_N):
        positions = start + tl.arange(0, BLOCK_N)
        visible = positions < prefix
        slots = tl.load(table_row + positions, mask=visible, other=0).to(tl.int64)
        offsets = (slots * NUM_KV_HEADS + kv_head) * HEAD_DIM
        mask = visible[:, None] & in_head[None, :]
        k = tl.load(k_pool_ptr + offsets[:, None] + dims[None, :], mask=mask, other=0.0)
        v = tl.load(v_pool_ptr + offsets[:, None] + dims[None, :], mask=mask, other=0.0)
        row_max, row_sum, acc = _attend_tile(q, k, v, visible, row_max, row_sum, acc, scale)

    out = acc / row_sum[:, None]
    tl.store(out_ptr + q_offsets[:, None] + dims[None, :], out.to(out_ptr.dtype.element_ty), mask=q_mask)


def block_attention(
    q: torch.Tensor,  # [bs * gamma, heads, hd]
    k: torch.Tensor,  # [bs * gamma, kv_heads, hd]
    v: torch.Tensor,  # [bs * gamma, kv_heads, hd]
    k_pool: torch.Tensor,  # [slots, kv_heads, hd]
    v_pool: torch.Tensor,  # [slots, kv_heads, hd]
    req_to_token: torch.Tensor,  # [rows, columns] int32
    req_pool_indices: torch.Tensor,  # [bs] int64
    prefix_lens: torch.Tensor,  # [bs] int64
) -> torch.Tensor:
    """Attend from every block row to its request's context and to its whole block, with scale ``hd ** -0.5``.

    Args:
        q, k, v: rows of the blocks, request by request, normalised and rotated; float32, float16 or bfloat16.
        k_pool, v_pool: context rows of this layer, contiguous.
        req_to_token: slot of every position of every request; columns ``0..prefix_lens[r]-1`` of row
            ``req_pool_indices[r]`` are read.
        prefix_lens: context length per request; 0 is allowed.

    Returns:
        [bs * gamma, heads, hd] in q's dtype; softmax and sums in float32. No host sync; safe under graph capture.

    Raises:
        ValueError: the pool rows are not contiguous.
    """
    if not (k_pool.is_contiguous() and v_pool.is_contiguous()):
        raise ValueError("k_pool and v_pool must be contiguous; pass one layer of a [L, slots, kv_heads, hd] pool")
    q, k, v = q.contiguous(), k.contiguous(), v.contiguous()
    out = torch.empty_like(q)
    bs = prefix_lens.shape[0]
    gamma, num_kv_heads, head_dim = q.shape[0] // bs, k.shape[1], q.shape[2]
    group = q.shape[1] // num_kv_heads
    _block_attention_kernel[(bs, num_kv_heads)](
        q,
        k,
        v,
        out,
        k_pool,
        v_pool,
        req_to_token,
        req_pool_indices,
        prefix_lens,
        req_to_token.stride(0),
        head_dim**-0.5,
        GAMMA=gamma,
        NUM_KV_HEADS=num_kv_heads,
        GROUP=group,
        HEAD_DIM=head_dim,
        BLOCK_M=max(_MIN_DOT, triton.next_power_of_2(gamma * group)),
        BLOCK_G=max(_MIN_DOT, triton.next_power_of_2(gamma)),
        BLOCK_N=_BLOCK_N,
        BLOCK_D=max(_MIN_DOT, triton.next_power_of_2(head_dim)),
    )
    return out
