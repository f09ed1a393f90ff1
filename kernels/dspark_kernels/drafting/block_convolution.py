"""Dynamic convolution along the slots of a block, round a sublayer of a drafter (DFlash 2).

With x the rows of a block, G channels to a group and K taps, ``y_j = sum_t (B[t] + D_j[t]) * x_{j - t}`` for t < K,
where rows before the block are 0, ``B [K, d]`` is a weight, and ``D_j [K, d / G]`` is alike for all channels of a
group. In torch that is four launches for two taps, and two more for each further tap; the kernel is one. A layer has
four such convolutions: 4 launches in place of 16, beside two projections.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from dspark_kernels.dispatch import on_kernels

_BLOCK = 512


def block_convolution_ref(
    rows: torch.Tensor,  # [T, d]
    base: torch.Tensor,  # [taps, d]
    dynamic: torch.Tensor,  # [T, taps, groups]
    width: int,
) -> torch.Tensor:
    """Compute the same as :func:`block_convolution` in plain torch, which can be differentiated."""
    groups = dynamic.shape[-1]
    kernels = base.unflatten(-1, (groups, -1)) + dynamic[..., None]
    kernels, x = (part.unflatten(0, (-1, width)) for part in (kernels, rows.unflatten(-1, (groups, -1))))
    convolved = kernels[:, :, 0] * x
    for tap in range(1, min(kernels.shape[2], width)):
        convolved[:, tap:].add_(kernels[:, tap:, tap] * x[:, :-tap])
    return convolved.flatten(0, 1).flatten(1)


# Blocks of each depth have another width; each would compile the kernel again.
@triton.jit(do_not_specialize=["width"])
def _block_convolution_kernel(
    rows_ptr,
    base_ptr,
    dynamic_ptr,
    out_ptr,
    row_stride,
    dynamic_stride,
    size,
    width,
    TAPS: tl.constexpr,
    GROUPS: tl.constexpr,
    GROUP_SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = columns < size
    slot = row % width
    dtype = out_ptr.dtype.element_ty
    total = tl.zeros([BLOCK], tl.float32)
    for tap in tl.static_range(TAPS):
        there = inside & (slot >= tap)
        base = tl.load(base_ptr + tap * size + columns, mask=there, other=0.0).to(tl.float32)
        dynamic_at = dynamic_ptr + row * dynamic_stride + tap * GROUPS + columns // GROUP_SIZE
        kernel = base + tl.load(dynamic_at, mask=there, other=0.0).to(tl.float32)
        x = tl.load(rows_ptr + (row - tap) * row_stride + columns, mask=there, other=0.0).to(tl.float32)
        # The intermediate casts repeat what torch does in the model's dtype.
        product = (kernel.to(dtype).to(tl.float32) * x).to(dtype).to(tl.float32)
        total = (total + product).to(dtype).to(tl.float32)
    tl.store(out_ptr + row * size + columns, total.to(dtype), mask=inside)


@on_kernels(block_convolution_ref)
def block_convolution(
    rows: torch.Tensor,  # [T, d]
    base: torch.Tensor,  # [taps, d]
    dynamic: torch.Tensor,  # [T, taps, groups]
    width: int,
) -> torch.Tensor:
    """Convolve the rows of whole blocks along their slots.

    Args:
        rows: of blocks with ``width`` rows each; rows may lie apart, as those of ``dynamic``.
        base: contiguous, of the same dtype.
        dynamic: what is added to the kernels of each row, for groups of d / groups channels.

    Returns:
        [T, d] of the same dtype. No host sync; safe under graph capture.

    Raises:
        ValueError: what is given does not fit together.
    """
    (num_rows, size), (taps, groups) = rows.shape, dynamic.shape[1:]
    fits = base.shape == (taps, size) and len(dynamic) == num_rows and size % groups == 0 and num_rows % width == 0
    if not (fits and base.is_contiguous() and rows.stride(1) == 1 and dynamic.stride()[1:] == (groups, 1)):
        raise ValueError(
            f"rows {list(rows.shape)} in blocks of {width}, base {list(base.shape)} and dynamic {list(dynamic.shape)} "
            "do not fit together; expected [T, d], [taps, d] and [T, taps, groups] with contiguous last dimensions"
        )
    out = torch.empty((num_rows, size), dtype=rows.dtype, device=rows.device)
    if out.numel() > 0:
        _block_convolution_kernel[(num_rows, triton.cdiv(size, _BLOCK))](
            rows,
            base,
            dynamic,
            out,
            rows.stride(0),
            dynamic.stride(0),
            size,
            width,
            TAPS=taps,
            GROUPS=groups,
            GROUP_SIZE=size // groups,
            BLOCK=_BLOCK,
            num_warps=2,
        )
    return out
