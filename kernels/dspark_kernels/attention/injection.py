"""Writes hidden states of the target as K/V of the drafter: k_norm, RoPE and the scatter into the pools in one launch.

The input is the output of one GEMM over the stacked K and V weights of all layers (DSpark, Eq. 3). K is normalised per
head and rotated, V is only moved. Which rows are kept is decided on the device, so that neither a host sync nor a
gather stands between verification and commit.

Bytes: 2 * n * L * 2 * kv_heads * hd elements, read once and written once; rows that are not kept cost neither. On an
H200 (4.3 TB/s for copies) the floor of 512 rows of a Qwen3-4B drafter (L 5, kv_heads 8, hd 128, bf16) is 4.9 us.

Rows of non-speculative steps are held back until the draft K/V of many of them is computed at once: what projects them
is read once per product, whatever the rows (252 MB of a Qwen3-8B drafter). To hold a row back moves it once, 41 KB.

Bytes: 2 * n * (w * sizeof(features) + 16).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from dspark_kernels.dispatch import on_kernels, runs_kernels

_PADDING_SLOT = 0


@dataclass(frozen=True)
class CommitRows:
    """The rows of a verified batch that are committed: the anchor and the accepted drafts of each request.

    Attributes:
        columns: [n] int, index of a row in its request's window; 0 is the anchor.
        requests: [n] int, request of a row. A row of a request outside ``0..bs-1`` is padding and never committed.
        accept_lens: [bs] int; a row is committed when its column is at most this. -1 commits nothing of a request.
    """

    columns: torch.Tensor
    requests: torch.Tensor
    accept_lens: torch.Tensor

    def kept(self) -> torch.Tensor:
        """Return which rows are kept, [n] bool. No host sync."""
        bs = self.accept_lens.shape[0]
        in_batch = (self.requests >= 0) & (self.requests < bs)
        return in_batch & (self.columns <= self.accept_lens[self.requests.clamp(0, bs - 1)])

    def narrowed(self) -> tuple[slice | torch.Tensor, CommitRows | None]:
        """Return which rows to compute K/V of, and which of those to commit.

        Returns:
            ``(index, rows)``: index [m] int64 of the kept rows and None if the host may read how many these are;
            all rows and this on a GPU, which would have to be waited for.
        """
        if runs_kernels(self.columns):
            return slice(None), self
        return self.kept().nonzero().squeeze(1), None


def kv_inject_ref(
    projected: torch.Tensor,  # [n, L * 2 * kv_heads * hd]
    k_norm_weight: torch.Tensor,  # [L, hd]
    eps: float,
    inv_freq: torch.Tensor,  # [hd / 2] float32
    positions: torch.Tensor,  # [n] int
    slots: torch.Tensor,  # [n] int
    pool: tuple[torch.Tensor, torch.Tensor],  # K and V, [L, slots, kv_heads, hd] each
    rows: CommitRows | None = None,
) -> None:
    """Compute the same as :func:`kv_inject` in plain torch; rows that are not kept land in slot 0. No host sync."""
    k_pool, v_pool = pool
    num_layers, _, num_kv_heads, head_dim = k_pool.shape
    k, v = projected.unflatten(-1, (num_layers, 2, num_kv_heads, head_dim)).permute(2, 1, 0, 3, 4).unbind(0)
    k = torch.nn.functional.rms_norm(k, (head_dim,), eps=eps) * k_norm_weight[:, None, None]
    angles = positions.to(torch.float32)[:, None, None] * inv_freq
    cos, sin = angles.cos(), angles.sin()
    low, high = k.float().chunk(2, dim=-1)
    k = torch.cat((low * cos - high * sin, high * cos + low * sin), dim=-1).to(k.dtype)
    slots = slots.to(torch.int64)
    if rows is not None:
        slots = torch.where(rows.kept(), slots, _PADDING_SLOT)
    k_pool[:, slots] = k.to(k_pool.dtype)
    v_pool[:, slots] = v.to(v_pool.dtype)


# Slots of a prefill begin anywhere in SGLang's list of free ones: no alignment may cause a compilation of its own.
_ROW_POINTERS = ["positions_ptr", "slots_ptr", "columns_ptr", "requests_ptr", "accepted_lens_ptr"]


@triton.jit(do_not_specialize=["num_requests"], do_not_specialize_on_alignment=_ROW_POINTERS)
def _kv_inject_kernel(
    projected_ptr,
    k_norm_ptr,
    inv_freq_ptr,
    positions_ptr,
    slots_ptr,
    columns_ptr,
    requests_ptr,
    accepted_lens_ptr,
    k_pool_ptr,
    v_pool_ptr,
    projected_stride,
    layer_stride,
    num_requests,
    eps,
    HAS_ROWS: tl.constexpr,
    NUM_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_H: tl.constexpr,  # >= NUM_HEADS
    BLOCK_D: tl.constexpr,  # >= HEAD_DIM / 2
):
    # One program per row and layer: all heads of a row share the angles, whose sines cost more than moving the data.
    row = tl.program_id(0).to(tl.int64)
    layer = tl.program_id(1).to(tl.int64)
    if HAS_ROWS:
        request = tl.load(requests_ptr + row)
        in_batch = (request >= 0) & (request < num_requests)
        accepted = tl.load(accepted_lens_ptr + request, mask=in_batch, other=-1)
        kept = in_batch & (tl.load(columns_ptr + row) <= accepted)
    else:
        kept = row >= 0

    if kept:
        half: tl.constexpr = HEAD_DIM // 2
        heads = tl.arange(0, BLOCK_H)
        dims = tl.arange(0, BLOCK_D)
        in_half = dims < half
        mask = (heads < NUM_HEADS)[:, None] & in_half[None, :]
        offsets = heads[:, None] * HEAD_DIM + dims[None, :]

        k_ptr = projected_ptr + row * projected_stride + layer * (2 * NUM_HEADS * HEAD_DIM)
        v_ptr = k_ptr + NUM_HEADS * HEAD_DIM
        k_low = tl.load(k_ptr + offsets, mask=mask, other=0.0)
        k_high = tl.load(k_ptr + offsets + half, mask=mask, other=0.0)
        v_low = tl.load(v_ptr + offsets, mask=mask, other=0.0)
        v_high = tl.load(v_ptr + offsets + half, mask=mask, other=0.0)

        # The intermediate casts repeat what torch does in the model's dtype: norm, times weight, then rotation.
        dtype = k_low.dtype
        low = k_low.to(tl.float32)
        high = k_high.to(tl.float32)
        mean_square = (tl.sum(low * low, 1) + tl.sum(high * high, 1)) / HEAD_DIM
        scale = tl.rsqrt(mean_square + eps)[:, None]
        norm_ptr = k_norm_ptr + layer * HEAD_DIM + dims
        weight_low = tl.load(norm_ptr, mask=in_half, other=0.0).to(tl.float32)[None, :]
        weight_high = tl.load(norm_ptr + half, mask=in_half, other=0.0).to(tl.float32)[None, :]
        low = ((low * scale).to(dtype).to(tl.float32) * weight_low).to(dtype).to(tl.float32)
        high = ((high * scale).to(dtype).to(tl.float32) * weight_high).to(dtype).to(tl.float32)

        position = tl.load(positions_ptr + row).to(tl.float32)
        angles = position * tl.load(inv_freq_ptr + dims, mask=in_half, other=0.0)
        cos = tl.cos(angles)[None, :]
        sin = tl.sin(angles)[None, :]
        rotated_low = (low * cos - high * sin).to(dtype)
        rotated_high = (high * cos + low * sin).to(dtype)

        slot = tl.load(slots_ptr + row).to(tl.int64)
        base = layer * layer_stride + slot * (NUM_HEADS * HEAD_DIM)
        pool_dtype = k_pool_ptr.dtype.element_ty
        tl.store(k_pool_ptr + base + offsets, rotated_low.to(pool_dtype), mask=mask)
        tl.store(k_pool_ptr + base + offsets + half, rotated_high.to(pool_dtype), mask=mask)
        tl.store(v_pool_ptr + base + offsets, v_low.to(pool_dtype), mask=mask)
        tl.store(v_pool_ptr + base + offsets + half, v_high.to(pool_dtype), mask=mask)


@on_kernels(kv_inject_ref)
def kv_inject(
    projected: torch.Tensor,  # [n, L * 2 * kv_heads * hd]
    k_norm_weight: torch.Tensor,  # [L, hd]
    eps: float,
    inv_freq: torch.Tensor,  # [hd / 2] float32
    positions: torch.Tensor,  # [n] int
    slots: torch.Tensor,  # [n] int
    pool: tuple[torch.Tensor, torch.Tensor],  # K and V, [L, slots, kv_heads, hd] each
    rows: CommitRows | None = None,
) -> None:
    """Write the K/V of the kept rows into the pools. No host sync; safe under graph capture.

    Two kept rows may not share a slot, except slot 0: the padding slot, which is not read.

    Args:
        projected: K and V of all layers, layer by layer with K before V; float32, float16 or bfloat16.
        k_norm_weight: RMSNorm weight of every layer's K, contiguous.
        inv_freq: rotary frequencies; the halves of a head are rotated against each other.
        positions: absolute positions.
        slots: pool rows.
        pool: contiguous; rows that are not kept are not touched.
        rows: which rows are kept; None keeps all, as in prefill.

    Raises:
        ValueError: shapes that do not fit together, or a pool that is not contiguous.
    """
    k_pool, v_pool = pool
    num_layers, num_slots, num_kv_heads, head_dim = k_pool.shape
    num_rows = projected.shape[0]
    if projected.shape[1] != 2 * num_layers * num_kv_heads * head_dim or head_dim % 2:
        raise ValueError(
            f"projected has {projected.shape[1]} columns where [L, slots, kv_heads, hd] = {list(k_pool.shape)} needs "
            "L * 2 * kv_heads * hd, with an even hd"
        )
    if not (k_pool.is_contiguous() and v_pool.is_contiguous() and k_norm_weight.is_contiguous()):
        raise ValueError("k_pool, v_pool and k_norm_weight must be contiguous")
    if num_rows == 0:
        return
    if projected.stride(1) != 1:
        projected = projected.contiguous()
    block_h, block_d = triton.next_power_of_2(num_kv_heads), triton.next_power_of_2(head_dim // 2)
    _kv_inject_kernel[(num_rows, num_layers)](
        projected,
        k_norm_weight,
        inv_freq,
        positions,
        slots,
        None if rows is None else rows.columns,
        None if rows is None else rows.requests,
        None if rows is None else rows.accept_lens,
        k_pool,
        v_pool,
        projected.stride(0),
        num_slots * num_kv_heads * head_dim,
        0 if rows is None else rows.accept_lens.shape[0],
        eps,
        HAS_ROWS=rows is not None,
        NUM_HEADS=num_kv_heads,
        HEAD_DIM=head_dim,
        BLOCK_H=block_h,
        BLOCK_D=block_d,
        # Eight elements of each of the four tiles per thread.
        num_warps=max(1, min(8, block_h * block_d // 256)),
    )


_BLOCK = 2048


@dataclass(frozen=True)
class HeldRows:
    """A ring of target rows in the order in which they came.

    Attributes:
        features: [capacity, w] that draft K/V is projected from.
        positions, slots: [capacity] int64 of these, as :func:`kv_inject` takes them.
        end: [1] int64, rows that have come; the next one goes to this place, or as far after the ring's beginning.
    """

    features: torch.Tensor
    positions: torch.Tensor
    slots: torch.Tensor
    end: torch.Tensor

    @classmethod
    def empty(cls, capacity: int, width: int, dtype: torch.dtype, device: torch.device | str) -> HeldRows:
        """Return a ring without rows."""
        numbers = torch.zeros((3, capacity), dtype=torch.int64, device=device)
        features = torch.zeros((capacity, width), dtype=dtype, device=device)
        return cls(features, numbers[0], numbers[1], numbers[2, :1])

    def first(self, number: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return features, positions and slots of the first rows."""
        return self.features[:number], self.positions[:number], self.slots[:number]


def hold_rows_ref(features: torch.Tensor, positions: torch.Tensor, slots: torch.Tensor, held: HeldRows) -> None:
    """Compute the same as :func:`hold_rows` in plain torch. No host sync."""
    places = (held.end + torch.arange(len(slots), device=slots.device)) % len(held.slots)
    held.features[places] = features
    held.positions[places], held.slots[places] = positions.long(), slots.long()
    held.end.add_(len(slots))


@triton.jit(do_not_specialize_on_alignment=["features_ptr", "positions_ptr", "slots_ptr"])
def _hold_rows_kernel(
    features_ptr,  # rows features_stride apart
    features_stride,
    positions_ptr,
    slots_ptr,
    end_ptr,
    held_features_ptr,
    held_positions_ptr,
    held_slots_ptr,
    capacity,
    width,
    BLOCK: tl.constexpr,
):
    row, part = tl.program_id(0), tl.program_id(1)
    place = (tl.load(end_ptr) + row) % capacity
    columns = part * BLOCK + tl.arange(0, BLOCK)
    in_row = columns < width
    features = tl.load(features_ptr + row.to(tl.int64) * features_stride + columns, mask=in_row)
    tl.store(held_features_ptr + place * width + columns, features, mask=in_row)
    if part == 0:
        tl.store(held_positions_ptr + place, tl.load(positions_ptr + row).to(tl.int64))
        tl.store(held_slots_ptr + place, tl.load(slots_ptr + row).to(tl.int64))


@on_kernels(hold_rows_ref)
def hold_rows(
    features: torch.Tensor,  # [n, w]
    positions: torch.Tensor,  # [n] int
    slots: torch.Tensor,  # [n] int
    held: HeldRows,
) -> None:
    """Append rows to those that are held. No host sync; safe under graph capture: the device knows where they go.

    Args:
        features: contiguous rows, which may lie apart; not more of them than the ring holds.

    Raises:
        ValueError: rows of another width or dtype, or too many.
    """
    (num_rows, width), capacity = features.shape, len(held.slots)
    if width != held.features.shape[1] or features.dtype != held.features.dtype or num_rows > capacity:
        raise ValueError(
            f"features {list(features.shape)} of {features.dtype} do not fit: expected up to {capacity} rows of "
            f"{held.features.shape[1]} numbers of {held.features.dtype}"
        )
    if num_rows == 0:
        return
    _hold_rows_kernel[(num_rows, triton.cdiv(width, _BLOCK))](
        features,
        features.stride(0),
        positions,
        slots,
        held.end,
        held.features,
        held.positions,
        held.slots,
        capacity,
        width,
        BLOCK=_BLOCK,
        num_warps=4,
    )
    held.end.add_(num_rows)
