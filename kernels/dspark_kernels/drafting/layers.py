"""Fused parts of the drafter's layers: products in eight bits, SwiGLU, residual and norm, dynamic convolutions.

**Eight bits**: ``x @ (codes * scales).T + bias``, with a scale for each row of the weight.

bfloat16 and float16 hold all codes, so the kernel multiplies codes as they are, in the dtype of x, and scales the sums:
only the weight is rounded, to within half a scale.

A few rows cost what the weight's bytes cost: for 7 rows of a Qwen3-8B drafter's MLP (gate and up, 24,576 x 4,096) 101
MB, where 16 bits have 201 MB. On an H200 (4.3 TB/s for copies) 24 us and 47 us are the floors. From 93 rows on,
multiplications are the floor (794 TFLOP/s), and from 186 rows on eight bits save nothing: there torch multiplies by the
same weight in its dtype, which is kept as well. The kernel has not run on a GPU yet.

**SwiGLU**: ``silu(gate) * up`` on the output of one GEMM that computes both. Bytes: 3 * T * I elements, two read and
one written. On an H200 (4.3 TB/s for copies) the floor of 448 rows of a Qwen3-4B drafter (I 9728, bf16) is 6.1 us;
F.silu and the product apart move 5 * T * I elements in two launches.

**Residual and norm** in one launch: ``sum = hidden + update``, ``RMSNorm(sum) * weight``. Bytes: 4 * T * d elements,
two read and two written. On an H200 (4.3 TB/s for copies) the floor of 448 rows of a Qwen3-4B drafter (d 2560, bf16) is
2.1 us; the sum and the norm apart move 5 * T * d elements in two launches.

SGLang has kernels for these two as well. Ours know no engine, and run under Triton's interpreter.

**Dynamic convolution** along the slots of a block, round a sublayer of a drafter (DFlash 2). With x the rows of a
block, G channels to a group and K taps, ``y_j = sum_t (B[t] + D_j[t]) * x_{j - t}`` for t < K, where rows before the
block are 0, ``B [K, d]`` is a weight, and ``D_j [K, d / G]`` is alike for all channels of a group. In torch that is
four launches for two taps, and two more for each further tap; the kernel is one. A layer has four such convolutions: 4
launches in place of 16, next to two projections.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
import triton
import triton.language as tl

from dspark_kernels.dispatch import num_processors, on_kernels

_INT8_MAX = 127
_INT8_ROWS_AT_ONCE = 4096  # that are quantised: their float32 copies are gone before the next ones
_INT8_MAX_ROWS = 128  # of x, for the kernel
_INT8_MIN_TILE = 16  # smallest tile side of tl.dot
_INT8_TILE = 64  # largest tile side for rows of either; three stages fit the shared memory of sm_89
_INT8_TILE_K = {torch.float32: 32}  # products in full float32 keep their operands in registers
_INT8_MAX_TILE_K = 128
_INT8_RESIDENTS = 2  # programs of a processor


@dataclass(frozen=True)
class Int8Weight:
    """A weight ``[out, in]`` in eight bits: row i is ``codes[i] * scales[i]``.

    Attributes:
        codes: [out, in] int8, -127 to 127, contiguous.
        scales: [out] float32.
        rounded: [out, in] the same weight in the dtype that it had.
    """

    codes: torch.Tensor
    scales: torch.Tensor
    rounded: torch.Tensor

    @classmethod
    def of(cls, weight: torch.Tensor) -> Int8Weight:
        """Round a weight: the largest number of a row becomes 127 or -127."""
        codes, rounded = torch.empty_like(weight, dtype=torch.int8), torch.empty_like(weight)
        scales = torch.empty(weight.shape[0], device=weight.device)
        parts = (tensor.split(_INT8_ROWS_AT_ONCE) for tensor in (weight, codes, scales, rounded))
        for rows, row_codes, row_scales, row_rounded in zip(*parts, strict=True):
            largest = rows.float().abs().amax(1)
            row_scales.copy_(torch.where(largest > 0, largest, 1.0) / _INT8_MAX)
            row_codes.copy_((rows.float() / row_scales[:, None]).round())
            row_rounded.copy_(row_codes * row_scales[:, None])
        return cls(codes, scales, rounded)

    @classmethod
    def cat(cls, weights: Sequence[Int8Weight]) -> Int8Weight:
        """Return the rows of weights, one below the other."""
        parts = zip(*((one.codes, one.scales, one.rounded) for one in weights), strict=True)
        return cls(*map(torch.cat, parts))

    @property
    def shape(self) -> torch.Size:
        """Return ``[out, in]``."""
        return self.codes.shape

    def chunk(self, number: int) -> tuple[Int8Weight, ...]:
        """Return so many parts of as many rows each, in the same storage."""
        parts = (tensor.chunk(number) for tensor in (self.codes, self.scales, self.rounded))
        return tuple(Int8Weight(*part) for part in zip(*parts, strict=True))


Weight = torch.Tensor | Int8Weight
"""A weight ``[out, in]`` in its dtype, or in eight bits."""


def linear(x: torch.Tensor, weight: Weight, bias: torch.Tensor | None = None) -> torch.Tensor:
    """Return ``x [..., in]`` times the weight, ``[..., out]``."""
    return int8_linear(x, weight, bias) if isinstance(weight, Int8Weight) else F.linear(x, weight, bias)


def in_its_dtype(weight: Weight) -> torch.Tensor:
    """Return a weight ``[out, in]`` in its dtype, rounded if it has eight bits, too."""
    return weight.rounded if isinstance(weight, Int8Weight) else weight


def int8_linear_ref(x: torch.Tensor, weight: Int8Weight, bias: torch.Tensor | None = None) -> torch.Tensor:
    """Compute the same as :func:`int8_linear` in plain torch."""
    product = F.linear(x.float(), weight.codes.float()) * weight.scales
    return (product if bias is None else product + bias.float()).to(x.dtype)


@triton.jit(do_not_specialize=["num_rows"])
def _int8_linear_kernel(
    x_ptr,  # [num_rows, size] rows, x_stride apart
    x_stride,
    codes_ptr,  # [num_out, size]
    scales_ptr,  # [num_out]
    bias_ptr,  # [num_out]; read when BIASED
    out_ptr,  # [num_rows, num_out]
    num_rows,
    num_out,
    size,
    BIASED: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    # Programs of the same rows of the weight come one after another, and find them in the L2.
    rows = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    outs = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    is_row, is_out = rows < num_rows, outs < num_out
    x_rows = x_ptr + rows.to(tl.int64)[:, None] * x_stride
    code_rows = codes_ptr + outs.to(tl.int64)[:, None] * size
    product = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for start in range(0, size, BLOCK_K):
        columns = start + tl.arange(0, BLOCK_K)
        is_column = columns < size
        x = tl.load(x_rows + columns[None, :], mask=is_row[:, None] & is_column[None, :], other=0.0)
        codes = tl.load(code_rows + columns[None, :], mask=is_out[:, None] & is_column[None, :], other=0)
        product += tl.dot(x, tl.trans(codes.to(x.dtype)), input_precision="ieee")
    product *= tl.load(scales_ptr + outs, mask=is_out, other=0.0)[None, :]
    if BIASED:
        product += tl.load(bias_ptr + outs, mask=is_out, other=0.0).to(tl.float32)[None, :]
    out = out_ptr + rows.to(tl.int64)[:, None] * num_out + outs[None, :]
    tl.store(out, product.to(x_ptr.dtype.element_ty), mask=is_row[:, None] & is_out[None, :])


@on_kernels(int8_linear_ref)
def int8_linear(x: torch.Tensor, weight: Int8Weight, bias: torch.Tensor | None = None) -> torch.Tensor:
    """Return ``x [..., in]``, float32, float16 or bfloat16, times a weight in eight bits.

    Sums are float32, each in one order, so that all ranks of a server get the same. Rows of x may lie apart. No host
    sync; safe under graph capture.

    Args:
        bias: [out].

    Returns:
        ``[..., out]`` in the dtype of x.

    Raises:
        ValueError: the widths of x and weight differ.
    """
    (num_out, size), rows = weight.shape, x.flatten(0, -2)
    if rows.shape[1] != size:
        raise ValueError(f"x {list(x.shape)} and weight {list(weight.shape)} do not fit: expected [..., in], [out, in]")
    num_rows = rows.shape[0]
    if num_rows > _INT8_MAX_ROWS:
        return F.linear(x, weight.rounded, bias)
    rows = rows if rows.stride(1) == 1 else rows.contiguous()
    out = torch.empty((num_rows, num_out), dtype=x.dtype, device=x.device)
    if out.numel() > 0:
        block_m = min(_INT8_TILE, max(_INT8_MIN_TILE, triton.next_power_of_2(num_rows)))
        groups, block_n = triton.cdiv(num_rows, block_m), _INT8_TILE
        # Few rows of the weight are shared out finely: it takes all processors to read as fast as memory is.
        while block_n > _INT8_MIN_TILE and groups * triton.cdiv(num_out, block_n) < _INT8_RESIDENTS * num_processors(
            x.device
        ):
            block_n //= 2
        _int8_linear_kernel[(groups, triton.cdiv(num_out, block_n))](
            rows,
            rows.stride(0),
            weight.codes,
            weight.scales,
            bias,
            out,
            num_rows,
            num_out,
            size,
            BIASED=bias is not None,
            BLOCK_M=block_m,
            BLOCK_N=block_n,
            BLOCK_K=_INT8_TILE_K.get(x.dtype, _INT8_MAX_TILE_K),
            num_warps=4,
            num_stages=3,
        )
    return out.view(*x.shape[:-1], num_out)


_SWIGLU_BLOCK = 512


def silu_mul_ref(gate_up: torch.Tensor) -> torch.Tensor:
    """Compute the same as :func:`silu_mul` in plain torch."""
    gate, up = gate_up.chunk(2, dim=-1)
    return F.silu(gate) * up


@triton.jit
def _silu_mul_kernel(gate_up_ptr, out_ptr, row_stride, size, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = columns < size
    gate_ptr = gate_up_ptr + row * row_stride
    gate = tl.load(gate_ptr + columns, mask=mask, other=0.0)
    up = tl.load(gate_ptr + size + columns, mask=mask, other=0.0)
    # The intermediate cast repeats what torch does in the model's dtype.
    dtype = gate.dtype
    gate = gate.to(tl.float32)
    activated = (gate / (1.0 + tl.exp(-gate))).to(dtype).to(tl.float32)
    tl.store(out_ptr + row * size + columns, (activated * up.to(tl.float32)).to(dtype), mask=mask)


@on_kernels(silu_mul_ref)
def silu_mul(gate_up: torch.Tensor) -> torch.Tensor:
    """Return ``silu(gate) * up [T, I]`` of ``gate_up [T, 2 * I]``, gate before up; float32, float16 or bfloat16.

    Rows may lie apart. No host sync; safe under graph capture.

    Raises:
        ValueError: an odd number of columns.
    """
    num_rows, columns = gate_up.shape
    if columns % 2:
        raise ValueError(f"expected [T, 2 * I], got {list(gate_up.shape)}")
    if gate_up.stride(1) != 1:
        gate_up = gate_up.contiguous()
    size = columns // 2
    out = torch.empty((num_rows, size), dtype=gate_up.dtype, device=gate_up.device)
    if out.numel() > 0:
        _silu_mul_kernel[(num_rows, triton.cdiv(size, _SWIGLU_BLOCK))](
            gate_up, out, gate_up.stride(0), size, BLOCK=_SWIGLU_BLOCK, num_warps=2
        )
    return out


_COLUMNS_PER_WARP = 512
_MAX_WARPS = 16


def add_norm_ref(
    hidden: torch.Tensor,  # [T, d]
    update: torch.Tensor,  # [T, d]
    weight: torch.Tensor,  # [d]
    eps: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute the same as :func:`add_norm` in plain torch."""
    total = hidden + update
    return total, F.rms_norm(total, weight.shape, weight, eps)


@triton.jit
def _add_norm_kernel(
    hidden_ptr,
    update_ptr,
    weight_ptr,
    total_ptr,
    normed_ptr,
    hidden_stride,
    update_stride,
    size,
    eps,
    BLOCK: tl.constexpr,  # >= size
):
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    mask = columns < size
    hidden = tl.load(hidden_ptr + row * hidden_stride + columns, mask=mask, other=0.0)
    update = tl.load(update_ptr + row * update_stride + columns, mask=mask, other=0.0)
    # torch rounds the sum to the model's dtype and norms what is left of it.
    dtype = hidden.dtype
    total = (hidden.to(tl.float32) + update.to(tl.float32)).to(dtype)
    tl.store(total_ptr + row * size + columns, total, mask=mask)
    values = total.to(tl.float32)
    scale = tl.rsqrt(tl.sum(values * values, 0) / size + eps)
    weight = tl.load(weight_ptr + columns, mask=mask, other=0.0).to(tl.float32)
    tl.store(normed_ptr + row * size + columns, (values * scale * weight).to(dtype), mask=mask)


@on_kernels(add_norm_ref)
def add_norm(
    hidden: torch.Tensor,  # [T, d]
    update: torch.Tensor,  # [T, d]
    weight: torch.Tensor,  # [d]
    eps: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Add what a layer's half has computed to the residual stream, and normalise the sum for the next one.

    Args:
        hidden: residual stream; float32, float16 or bfloat16. Rows may lie apart.
        update: in the same dtype; likewise.
        weight: of the norm, contiguous.
        eps: of the norm.

    Returns:
        The sum and its norm, both ``[T, d]`` contiguous in the dtype of ``hidden``; the statistics are float32. No host
        sync; safe under graph capture.

    Raises:
        ValueError: shapes that do not fit together.
    """
    num_rows, size = hidden.shape
    if update.shape != hidden.shape or weight.shape != (size,):
        raise ValueError(
            f"hidden {list(hidden.shape)}, update {list(update.shape)} and weight {list(weight.shape)} do not fit "
            "together: expected [T, d], [T, d] and [d]"
        )
    hidden, update = (x if x.stride(1) == 1 else x.contiguous() for x in (hidden, update))
    total = torch.empty((num_rows, size), dtype=hidden.dtype, device=hidden.device)
    normed = torch.empty_like(total)
    if num_rows > 0:
        block = triton.next_power_of_2(size)
        _add_norm_kernel[(num_rows,)](
            hidden,
            update,
            weight,
            total,
            normed,
            hidden.stride(0),
            update.stride(0),
            size,
            eps,
            BLOCK=block,
            num_warps=min(max(block // _COLUMNS_PER_WARP, 1), _MAX_WARPS),
        )
    return total, normed


_CONVOLUTION_BLOCK = 512


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
        _block_convolution_kernel[(num_rows, triton.cdiv(size, _CONVOLUTION_BLOCK))](
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
            BLOCK=_CONVOLUTION_BLOCK,
            num_warps=2,
        )
    return out
