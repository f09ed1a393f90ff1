"""Survivals of drafts, the running products of calibrated confidences (DSpark, Eq. 9): one launch where torch has six.

Bytes: 4 per draft read and 4 written; the launch is the cost.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from dspark_kernels.dispatch import on_kernels

_REQUESTS_PER_PROGRAM = 32
_MIN_BLOCK_J = 8  # drafts of the smallest tile: shorter blocks have one compiled form


def block_survival_ref(coefficients: torch.Tensor, logits: torch.Tensor | None, bs: int) -> torch.Tensor:
    """Compute the same as :func:`block_survival` in plain torch."""
    scale, shift = coefficients
    conditional = scale.expand(bs, -1) if logits is None else torch.sigmoid(logits.float() * scale + shift)
    return conditional.nan_to_num(0.0).cumprod(1).cummin(1).values


@triton.jit
def _smaller(a, b):
    return tl.minimum(a, b)


# Depths and batches change from step to step; each would compile the kernel again.
@triton.jit(
    do_not_specialize=["bs", "depth", "logits_stride", "coefficients_stride"],
    do_not_specialize_on_alignment=["coefficients_ptr", "logits_ptr"],
)
def _survival_kernel(
    coefficients_ptr,
    logits_ptr,
    out_ptr,
    bs,
    depth,
    logits_stride,
    coefficients_stride,
    BLOCK_R: tl.constexpr,
    BLOCK_J: tl.constexpr,  # >= depth
):
    request = tl.program_id(0) * BLOCK_R + tl.arange(0, BLOCK_R)[:, None]
    draft = tl.arange(0, BLOCK_J)[None, :]
    inside = (request < bs) & (draft < depth)
    scale = tl.load(coefficients_ptr + draft, mask=draft < depth, other=0.0)
    conditional = tl.broadcast_to(scale, [BLOCK_R, BLOCK_J])
    if logits_ptr is not None:
        shift = tl.load(coefficients_ptr + coefficients_stride + draft, mask=draft < depth, other=0.0)
        logit = tl.load(logits_ptr + request * logits_stride + draft, mask=inside, other=0.0).to(tl.float32)
        conditional = tl.sigmoid(logit * scale + shift)
    conditional = tl.where(conditional == conditional, conditional, 0.0)
    survival = tl.associative_scan(tl.cumprod(conditional, 1), 1, _smaller)
    tl.store(out_ptr + request * depth + draft, survival, mask=inside)


@on_kernels(block_survival_ref)
def block_survival(coefficients: torch.Tensor, logits: torch.Tensor | None, bs: int) -> torch.Tensor:
    """Return [bs, depth] float32 probabilities that drafts and all before them in their blocks are accepted.

    They never rise along a block: a parallel product may, in the last bit, and a draft must not rank before its
    predecessor. A NaN, from a broken head, would not rank at all, and counts as a rejection.

    Args:
        coefficients: [2, depth] float32, scale and shift of logits; without any, row 0 is the acceptance by position.
        logits: [bs, depth] of the confidence head, any float dtype; None without one.
        bs: requests. Columns of both are contiguous. No host sync; safe under graph capture.
    """
    depth = coefficients.shape[1]
    out = torch.empty((bs, depth), dtype=torch.float32, device=coefficients.device)
    if out.numel() > 0:
        strides = 0 if logits is None else logits.stride(0), coefficients.stride(0)
        block_j = max(_MIN_BLOCK_J, triton.next_power_of_2(depth))
        _survival_kernel[(triton.cdiv(bs, _REQUESTS_PER_PROGRAM),)](
            coefficients, logits, out, bs, depth, *strides, BLOCK_R=_REQUESTS_PER_PROGRAM, BLOCK_J=block_j, num_warps=1
        )
    return out
