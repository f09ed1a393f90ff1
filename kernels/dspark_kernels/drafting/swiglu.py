"""SwiGLU's activation ``silu(gate) * up`` on the output of one GEMM that computes both.

Bytes: 3 * T * I elements, two read and one written. On an H200 (4.3 TB/s for copies) the floor of 448 rows of a
Qwen3-4B drafter (I 9728, bf16) is 6.1 us; F.silu and the product apart move 5 * T * I elements in two launches.

SGLang has a kernel for this, too. This one knows no engine, and runs under Triton's interpreter.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
import triton
import triton.language as tl

from dspark_kernels.dispatch import on_kernels

_BLOCK = 512


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
    """``gate_up [T, 2 * I]``, gate before up, float32, float16 or bfloat16 -> ``silu(gate) * up [T, I]``.

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
        _silu_mul_kernel[(num_rows, triton.cdiv(size, _BLOCK))](
            gate_up, out, gate_up.stride(0), size, BLOCK=_BLOCK, num_warps=2
        )
    return out
