"""A product with a weight in eight bits, ``x @ (codes * scales).T + bias``, with a scale for each row of the weight.

bfloat16 and float16 hold all codes, so the kernel multiplies codes as they are, in the dtype of x, and scales the sums:
what is rounded is the weight alone, to within half a scale.

A few rows cost what the weight's bytes cost: for 7 rows of a Qwen3-8B drafter's MLP (gate and up, 24,576 x 4,096)
101 MB, where 16 bits have 201 MB. On an H200 (4.3 TB/s for copies) 24 us and 47 us are the floors. From 93 rows on,
multiplications are the floor (794 TFLOP/s), and from 186 rows on eight bits save nothing: there torch multiplies by the
same weight in its dtype, which is kept beside. The kernel has not run on a GPU yet.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
import triton
import triton.language as tl

from dspark_kernels.dispatch import on_kernels
from dspark_kernels.hardware import num_processors

_LARGEST = 127
_QUANTISED_ROWS = 4096  # at a time: their float32 copies are gone before the next ones
_MOST_ROWS = 128  # of x, for the kernel
_MIN_DOT = 16  # smallest tile side of tl.dot
_BLOCK = 64  # largest tile side for rows of either; three stages fit the shared memory of sm_89
_BLOCK_K = {torch.float32: 32}  # products in full float32 keep their operands in registers
_MAX_BLOCK_K = 128
_RESIDENTS = 2  # programs of a processor


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
        parts = (tensor.split(_QUANTISED_ROWS) for tensor in (weight, codes, scales, rounded))
        for rows, row_codes, row_scales, row_rounded in zip(*parts, strict=True):
            largest = rows.float().abs().amax(1)
            row_scales.copy_(torch.where(largest > 0, largest, 1.0) / _LARGEST)
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
    if num_rows > _MOST_ROWS:
        return F.linear(x, weight.rounded, bias)
    rows = rows if rows.stride(1) == 1 else rows.contiguous()
    out = torch.empty((num_rows, num_out), dtype=x.dtype, device=x.device)
    if out.numel() > 0:
        block_m = min(_BLOCK, max(_MIN_DOT, triton.next_power_of_2(num_rows)))
        groups, block_n = triton.cdiv(num_rows, block_m), _BLOCK
        # Few rows of the weight are shared out finely: it takes all processors to read as fast as memory is.
        while block_n > _MIN_DOT and groups * triton.cdiv(num_out, block_n) < _RESIDENTS * num_processors(x.device):
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
            BLOCK_K=_BLOCK_K.get(x.dtype, _MAX_BLOCK_K),
            num_warps=4,
            num_stages=3,
        )
    return out.view(*x.shape[:-1], num_out)
