"""Survivals of a drafted block: the running product of its calibrated confidences (DSpark, Eq. 9), in one launch.

Bytes: 4 per draft read and 4 written; the launch is the cost. In torch it takes six.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from dspark_kernels.dispatch import on_kernels

_REQUESTS_PER_PROGRAM = 32
# The smallest tile: blocks of up to so many drafts have one compiled form.
_MIN_BLOCK_J = 8


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
    coefficients_ptr,  # [2, coefficients_stride] float32
    logits_ptr,  # [bs, logits_stride]; None without a confidence head
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
    """Return the probability of each draft that it and all before it in its block are accepted.

    It never rises along a block: a parallel product may, in the last bit, and a draft must not rank before its
    predecessor. A NaN, from a broken head, counts as a rejection: it would not rank at all.

    Args:
        coefficients: [2, depth] float32, scale and shift of the calibrated logits; without any, the acceptance of each
            position and what is not read. Columns are contiguous.
        logits: [bs, depth] of the confidence head, any float dtype, columns contiguous; None without one.
        bs: requests.

    Returns:
        [bs, depth] float32. No host sync; safe under graph capture.
    """
    depth = coefficients.shape[1]
    out = torch.empty((bs, depth), dtype=torch.float32, device=coefficients.device)
    if out.numel() > 0:
        _survival_kernel[(triton.cdiv(bs, _REQUESTS_PER_PROGRAM),)](
            coefficients,
            logits,
            out,
            bs,
            depth,
            0 if logits is None else logits.stride(0),
            coefficients.stride(0),
            BLOCK_R=_REQUESTS_PER_PROGRAM,
            BLOCK_J=max(_MIN_BLOCK_J, triton.next_power_of_2(depth)),
            num_warps=1,
        )
    return out
