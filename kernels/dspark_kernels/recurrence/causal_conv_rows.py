"""The short causal convolution in front of the gated delta rule, over the ragged rows of a verification.

Channel c of row t, of W taps and a window of the W - 1 rows before the request's first:

    out[t, c] = silu(bias[c] + sum over j of weight[c, j] * x[t - W + 1 + j, c])

Verification leaves windows alone; the commit moves them on by the accepted rows, in all layers with one launch. What is
rounded is what SGLang's decode rounds: an earlier row to the dtype of the window, which a decode would have read it
from, and a product to the dtype of its factors if they share one; sums and SiLU are float32.

Bytes: 2 * N * C elements, read once and written once, and a window of C * (W - 1) for each request; the commit reads
and writes only windows. No time was measured yet.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
import triton
import triton.language as tl

from dspark_kernels.dispatch import on_kernels


@dataclass(frozen=True)
class StateRows:
    """Ragged rows that run through a recurrent layer, each request from the state in its slot.

    Attributes:
        indptr: [bs + 1] int, first row of each request; rows from ``indptr[bs]`` on are padding.
        slots: [bs] int, slots of a layer's pool. A request with a slot below 0 starts from zeros, and stores nothing.
    """

    indptr: torch.Tensor
    slots: torch.Tensor

    def with_rows(self) -> list[tuple[int, int, int]]:
        """Return first row, end and slot of each request that has rows, on the host."""
        columns = self.indptr[:-1].tolist(), self.indptr[1:].tolist(), self.slots.tolist()
        return [(first, end, slot) for first, end, slot in zip(*columns, strict=True) if first < end]


@dataclass(frozen=True)
class ReplayedRows(StateRows):
    """The rows that a commit runs again: of each request those that were accepted.

    Attributes:
        lengths: [bs] int, the anchor and the accepted drafts; at most the rows that the request has. Below 1 its state
            stays as it is.
        track_lengths: [bs] int, rows after which the state goes to a second slot as well, as a cached prefix needs it;
            below 1 and above ``lengths`` none is stored. None: for no request.
        track_slots: [bs] int, these second slots; below 0 none is stored.
    """

    lengths: torch.Tensor
    track_lengths: torch.Tensor | None = None
    track_slots: torch.Tensor | None = None

    def replays(self) -> list[tuple[int, int, int, dict[int, int]]]:
        """Return first row, length, slot and ``{length: track slot}`` of requests that store a state, on the host."""
        given = [part for part in (self.track_lengths, self.track_slots) if part is not None]
        tracks = given or [torch.full_like(self.slots, -1)] * 2
        lengths = torch.minimum(self.lengths, self.indptr.diff())
        columns = (self.indptr[:-1], lengths, self.slots, *tracks)
        return [
            (first, length, slot, {after: track} if track >= 0 else {})
            for first, length, slot, after, track in zip(*(column.tolist() for column in columns), strict=True)
            if slot >= 0 and length > 0
        ]


_CHANNELS_PER_PROGRAM = 256
_WARPS = 4


def causal_conv_rows_ref(
    x: torch.Tensor,  # [N, C]
    weight: torch.Tensor,  # [C, W]
    bias: torch.Tensor | None,  # [C]
    windows: torch.Tensor,  # [pool, C, W - 1]
    rows: StateRows,
    out: torch.Tensor | None = None,  # [N, C]
) -> torch.Tensor:
    """Compute the same as :func:`causal_conv_rows` in plain torch."""
    out = torch.zeros_like(x) if out is None else out.zero_()
    num_before = windows.shape[2]
    for first, end, slot in rows.with_rows():
        window = windows[slot].T if slot >= 0 else torch.zeros_like(windows[0].T)
        before = torch.cat([window, x[first:end].to(windows.dtype)])
        # One by one: how torch rounds depends on the size of its tensors, and a replay has to give the same bits.
        for row in range(first, end):
            total = torch.zeros_like(x[row], dtype=torch.float32) if bias is None else bias.float()
            for tap in range(num_before):
                total = total + (before[row - first + tap] * weight[:, tap]).float()
            total = total + (x[row] * weight[:, num_before]).float()
            out[row] = F.silu(total).to(out.dtype)
    return out


def commit_conv_windows_ref(
    x: torch.Tensor,  # [L, N, C]
    windows: torch.Tensor,  # [L, pool, C, W - 1]
    rows: ReplayedRows,
) -> None:
    """Compute the same as :func:`commit_conv_windows` in plain torch."""
    num_before = windows.shape[3]
    for first, length, slot, tracked in rows.replays():
        inputs = x[:, first : first + length].to(windows.dtype).mT
        extended = torch.cat([windows[:, slot], inputs], dim=2)
        for after, track_slot in tracked.items():
            if 0 < after <= length:
                windows[:, track_slot] = extended[:, :, after : after + num_before]
        windows[:, slot] = extended[:, :, length:]


# Parts of buffers of a captured step: no alignment may cause a compilation of its own.
_ROW_POINTERS = ["indptr_ptr", "slots_ptr", "lengths_ptr", "track_lengths_ptr", "track_slots_ptr"]


@triton.jit
def _product(x, weight):
    # Of 16 bits, the product is exact in float32: it is rounded once, as where a GPU multiplies 16 bits.
    product = x.to(tl.float32) * weight.to(tl.float32)
    if x.dtype == weight.dtype:
        product = product.to(x.dtype).to(tl.float32)
    return product


@triton.jit(do_not_specialize=["num_rows"], do_not_specialize_on_alignment=_ROW_POINTERS)
def _causal_conv_rows_kernel(
    x_ptr,
    weight_ptr,
    bias_ptr,
    windows_ptr,
    out_ptr,
    indptr_ptr,
    slots_ptr,
    x_stride,
    out_stride,
    slot_stride,
    channel_stride,
    tap_stride,
    num_rows,
    num_channels,
    HAS_BIAS: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK_C: tl.constexpr,
):
    # One program per request and block of channels; one more for the rows after the last request.
    request = tl.program_id(1)
    channels = tl.program_id(0) * BLOCK_C + tl.arange(0, BLOCK_C)
    mask = channels < num_channels
    first = tl.load(indptr_ptr + request).to(tl.int64)
    out_ptr += channels
    x_ptr += channels
    if request == tl.num_programs(1) - 1:
        for row in range(first, num_rows):
            tl.store(out_ptr + row * out_stride, tl.zeros([BLOCK_C], dtype=out_ptr.dtype.element_ty), mask=mask)
    else:
        slot = tl.load(slots_ptr + request).to(tl.int64)
        window_ptr = windows_ptr + slot * slot_stride + channels.to(tl.int64) * channel_stride
        dtype = windows_ptr.dtype.element_ty
        for row in range(first, tl.load(indptr_ptr + request + 1).to(tl.int64)):
            total = tl.zeros([BLOCK_C], dtype=tl.float32)
            if HAS_BIAS:
                total += tl.load(bias_ptr + channels, mask=mask, other=0.0).to(tl.float32)
            for tap in tl.static_range(WIDTH - 1):
                source = row - (WIDTH - 1) + tap
                stored = mask & (source < first) & (slot >= 0)
                before = tl.load(window_ptr + (source - first + WIDTH - 1) * tap_stride, mask=stored, other=0.0)
                earlier = tl.load(x_ptr + source * x_stride, mask=mask & (source >= first), other=0.0).to(dtype)
                weight = tl.load(weight_ptr + channels * WIDTH + tap, mask=mask, other=0.0)
                total += _product(tl.where(source < first, before, earlier), weight)
            weight = tl.load(weight_ptr + channels * WIDTH + WIDTH - 1, mask=mask, other=0.0)
            total += _product(tl.load(x_ptr + row * x_stride, mask=mask, other=0.0), weight)
            total = total / (1.0 + tl.exp(-total))
            tl.store(out_ptr + row * out_stride, total.to(out_ptr.dtype.element_ty), mask=mask)


@triton.jit
def _store_window(
    x_ptr,
    window_ptr,
    target_ptr,
    length,
    x_stride,
    channel_stride,
    tap_stride,
    channels,
    mask,
    WIDTH: tl.constexpr,
    BLOCK_W: tl.constexpr,
):
    """Write the window after ``length`` rows, which begin at ``x_ptr``."""
    taps = tl.arange(0, BLOCK_W)
    mask = mask[:, None] & (taps < WIDTH - 1)[None, :]
    source = (length - (WIDTH - 1) + taps)[None, :]
    offsets = channels[:, None] * channel_stride
    before_ptr = window_ptr + offsets + (length + taps)[None, :] * tap_stride
    before = tl.load(before_ptr, mask=mask & (source < 0), other=0.0)
    rows = tl.load(x_ptr + source * x_stride + channels[:, None], mask=mask & (source >= 0), other=0.0)
    # The target may be what was read: all threads have to have read it.
    tl.debug_barrier()
    window = tl.where(source < 0, before, rows.to(before.dtype))
    tl.store(target_ptr + offsets + taps[None, :] * tap_stride, window, mask=mask)


@triton.jit(do_not_specialize_on_alignment=_ROW_POINTERS)
def _commit_conv_windows_kernel(
    x_ptr,
    windows_ptr,
    indptr_ptr,
    slots_ptr,
    lengths_ptr,
    track_lengths_ptr,
    track_slots_ptr,
    x_layer,
    windows_layer,
    x_stride,
    slot_stride,
    channel_stride,
    tap_stride,
    num_channels,
    HAS_TRACKS: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK_C: tl.constexpr,
    BLOCK_W: tl.constexpr,  # >= WIDTH - 1
):
    # One program per block of channels, request and layer.
    request = tl.program_id(1)
    layer = tl.program_id(2).to(tl.int64)
    channels = (tl.program_id(0) * BLOCK_C + tl.arange(0, BLOCK_C)).to(tl.int64)
    mask = channels < num_channels
    first = tl.load(indptr_ptr + request).to(tl.int64)
    slot = tl.load(slots_ptr + request).to(tl.int64)
    rows_of_request = tl.load(indptr_ptr + request + 1).to(tl.int64) - first
    length = tl.minimum(tl.load(lengths_ptr + request).to(tl.int64), rows_of_request)
    if (slot >= 0) & (length > 0):
        x_ptr += layer * x_layer + first * x_stride
        windows_ptr += layer * windows_layer
        own_ptr = windows_ptr + slot * slot_stride
        if HAS_TRACKS:
            track_slot = tl.load(track_slots_ptr + request).to(tl.int64)
            track_length = tl.load(track_lengths_ptr + request).to(tl.int64)
            tracked = mask & (track_slot >= 0) & (track_length > 0) & (track_length <= length)
            track_ptr = windows_ptr + track_slot * slot_stride
            _store_window(
                x_ptr,
                own_ptr,
                track_ptr,
                track_length,
                x_stride,
                channel_stride,
                tap_stride,
                channels,
                tracked,
                WIDTH,
                BLOCK_W,
            )
        _store_window(
            x_ptr, own_ptr, own_ptr, length, x_stride, channel_stride, tap_stride, channels, mask, WIDTH, BLOCK_W
        )


@on_kernels(causal_conv_rows_ref)
def causal_conv_rows(
    x: torch.Tensor,  # [N, C]
    weight: torch.Tensor,  # [C, W]
    bias: torch.Tensor | None,  # [C]
    windows: torch.Tensor,  # [pool, C, W - 1]
    rows: StateRows,
    out: torch.Tensor | None = None,  # [N, C]
) -> torch.Tensor:
    """Convolve all rows of all requests with what stood before them, and apply SiLU; windows are left alone.

    Args:
        x: float32, float16 or bfloat16. Channels lie side by side, rows may lie apart.
        weight: contiguous.
        bias: contiguous; None for none.
        windows: pool of the layer, oldest row first, in any strides and in a dtype of its own.
        rows: the requests' rows and slots.
        out: what is written to, laid out like ``x`` and apart from it; None makes it.

    Returns:
        ``out`` in x's dtype, 0 in rows of no request. No host sync; safe under graph capture.

    Raises:
        ValueError: shapes that do not fit together, or a layout that the kernel cannot read.
    """
    num_rows, num_channels = x.shape
    width = weight.shape[1]
    out = torch.empty((num_rows, num_channels), dtype=x.dtype, device=x.device) if out is None else out
    if weight.shape != (num_channels, width) or windows.shape[1:] != (num_channels, width - 1) or out.shape != x.shape:
        raise ValueError(
            f"weight {list(weight.shape)}, windows {list(windows.shape)} and out {list(out.shape)} do not fit x "
            f"{list(x.shape)}: expected [C, W], [pool, C, W - 1] and [N, C]"
        )
    if x.stride(1) != 1 or out.stride(1) != 1 or not weight.is_contiguous():
        raise ValueError("channels of x and of out, and weight must be contiguous")
    _causal_conv_rows_kernel[triton.cdiv(num_channels, _CHANNELS_PER_PROGRAM), len(rows.slots) + 1](
        x,
        weight,
        bias,
        windows,
        out,
        rows.indptr,
        rows.slots,
        x.stride(0),
        out.stride(0),
        *windows.stride(),
        num_rows,
        num_channels,
        HAS_BIAS=bias is not None,
        WIDTH=width,
        BLOCK_C=_CHANNELS_PER_PROGRAM,
        num_warps=_WARPS,
    )
    return out


@on_kernels(commit_conv_windows_ref)
def commit_conv_windows(
    x: torch.Tensor,  # [L, N, C]
    windows: torch.Tensor,  # [L, pool, C, W - 1]
    rows: ReplayedRows,
) -> None:
    """Move the windows of all layers on over the accepted rows, in place; with tracks, store them a second time.

    Two requests may not share a slot; what a shared padding slot then holds is undefined. No host sync; safe under
    graph capture.

    Args:
        x: inputs of the convolution as they were verified. Channels lie side by side, rows may lie apart.
        windows: pools of the layers, oldest row first, in any strides.
        rows: which rows, and where the windows lie.

    Raises:
        ValueError: shapes that do not fit together, or a layout that the kernel cannot read.
    """
    num_layers, _, num_channels = x.shape
    if windows.shape[0] != num_layers or windows.shape[2] != num_channels or x.stride(2) != 1:
        raise ValueError(
            f"windows {list(windows.shape)} do not fit x {list(x.shape)} of strides {list(x.stride())}: expected "
            "[L, pool, C, W - 1] and [L, N, C] with contiguous channels"
        )
    _commit_conv_windows_kernel[triton.cdiv(num_channels, _CHANNELS_PER_PROGRAM), len(rows.slots), num_layers](
        x,
        windows,
        rows.indptr,
        rows.slots,
        rows.lengths,
        rows.track_lengths,
        rows.track_slots,
        x.stride(0),
        windows.stride(0),
        x.stride(1),
        *windows.stride()[1:],
        num_channels,
        HAS_TRACKS=rows.track_lengths is not None,
        WIDTH=windows.shape[3] + 1,
        BLOCK_C=_CHANNELS_PER_PROGRAM,
        BLOCK_W=triton.next_power_of_2(windows.shape[3]),
        num_warps=_WARPS,
    )
