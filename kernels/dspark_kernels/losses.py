"""Cross-entropy and total variation of draft logits against target logits, with the gradient, in one pass over memory.

For draft probabilities p and target probabilities q of a row, and the label y::

    ce = -log p(y)      tv = sum_v |p(v) - q(v)|
    gradient of  a * ce + b * tv  in the draft logits:  a * (p - onehot(y)) + b * p * (s - sum(p * s)),  s = sign(p - q)

In torch this is some fifteen passes over [n, v] in float32. The kernel reads both logits (the second and third time
from the L2 cache) and writes the gradient over those of the draft: 3 * v * itemsize bytes a row, and no other tensor.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from dspark_kernels.dispatch import on_kernels

_BLOCK = 2048


def distribution_loss_ref(
    logits: torch.Tensor,  # [n, v]
    target_logits: torch.Tensor,  # [n, v]
    log_weight: torch.Tensor | None,  # [v]
    labels: torch.Tensor,  # [n] int64
    row_weights: torch.Tensor,  # [n]
    *,
    ce_weight: float,
    tv_weight: float,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Compute the same as :func:`distribution_loss`; float64 logits are computed in float64."""
    dtype = torch.promote_types(logits.dtype, torch.float32)
    draft, target = logits.to(dtype), target_logits.to(dtype)
    if log_weight is not None:
        draft, target = draft + log_weight, target + log_weight
    draft = torch.softmax(draft, dim=-1)
    difference = draft - torch.softmax(target, dim=-1)
    tv = difference.abs().sum(-1)
    inside = labels >= 0
    at_label = labels.clamp(min=0)[:, None]
    ce = torch.where(inside, -draft.gather(-1, at_label)[:, 0].clamp(min=1e-30).log(), 0.0)
    sign = difference.sign_()
    sign -= (draft * sign).sum(-1, keepdim=True)
    sign *= tv_weight
    sign += ce_weight * inside[:, None]
    grad = draft.mul_(sign)
    grad.scatter_add_(-1, at_label, (-ce_weight * inside.to(dtype))[:, None])
    return ce, tv, (grad * row_weights[:, None]).to(logits.dtype)


@triton.jit
def _load(logits_ptr, log_weight_ptr, columns, mask, WEIGHTED: tl.constexpr):
    logits = tl.load(logits_ptr + columns, mask=mask, other=float("-inf")).to(tl.float32)
    if WEIGHTED:
        logits += tl.load(log_weight_ptr + columns, mask=mask, other=0.0)
    return logits


@triton.jit
def _distribution_loss_kernel(
    logits_ptr,  # [n, v], overwritten with the gradient
    target_logits_ptr,  # [n, v]
    log_weight_ptr,  # [v] float32, None unless WEIGHTED
    labels_ptr,  # [n] int64
    row_weights_ptr,  # [n] float32
    ce_ptr,  # [n] float32
    tv_ptr,  # [n] float32
    v,
    ce_weight,
    tv_weight,
    WEIGHTED: tl.constexpr,
    BLOCK: tl.constexpr,
):
    # One program per row.
    row = tl.program_id(0).to(tl.int64)
    draft_row = logits_ptr + row * v
    target_row = target_logits_ptr + row * v
    lanes = tl.arange(0, BLOCK)

    # Running maximum and sum of every lane; a finite start, for -inf minus -inf is not a number.
    draft_max = tl.full([BLOCK], -1e30, tl.float32)
    target_max = tl.full([BLOCK], -1e30, tl.float32)
    draft_sum = tl.zeros([BLOCK], tl.float32)
    target_sum = tl.zeros([BLOCK], tl.float32)
    for start in range(0, v, BLOCK):
        columns = start + lanes
        draft = _load(draft_row, log_weight_ptr, columns, columns < v, WEIGHTED)
        target = _load(target_row, log_weight_ptr, columns, columns < v, WEIGHTED)
        larger = tl.maximum(draft_max, draft)
        draft_sum = draft_sum * tl.exp(draft_max - larger) + tl.exp(draft - larger)
        draft_max = larger
        larger = tl.maximum(target_max, target)
        target_sum = target_sum * tl.exp(target_max - larger) + tl.exp(target - larger)
        target_max = larger
    draft_top = tl.max(draft_max, 0)
    target_top = tl.max(target_max, 0)
    draft_total = tl.sum(draft_sum * tl.exp(draft_max - draft_top), 0)
    target_total = tl.sum(target_sum * tl.exp(target_max - target_top), 0)

    # Read before the sums below, which all warps of the program wait for: after them the first gradients are written.
    label = tl.load(labels_ptr + row)
    inside = label >= 0
    at_label = tl.load(draft_row + tl.maximum(label, 0)).to(tl.float32)
    if WEIGHTED:
        at_label += tl.load(log_weight_ptr + tl.maximum(label, 0))

    distances = tl.zeros([BLOCK], tl.float32)
    signed = tl.zeros([BLOCK], tl.float32)
    for start in range(0, v, BLOCK):
        columns = start + lanes
        p = tl.exp(_load(draft_row, log_weight_ptr, columns, columns < v, WEIGHTED) - draft_top) / draft_total
        q = tl.exp(_load(target_row, log_weight_ptr, columns, columns < v, WEIGHTED) - target_top) / target_total
        distances += tl.abs(p - q)
        signed += tl.where(p > q, p, tl.where(p < q, -p, 0.0))
    mean_sign = tl.sum(signed, 0)
    tl.store(tv_ptr + row, tl.sum(distances, 0))

    p_label = tl.maximum(tl.exp(at_label - draft_top) / draft_total, 1e-30)
    tl.store(ce_ptr + row, tl.where(inside, -tl.log(p_label), 0.0))

    row_weight = tl.load(row_weights_ptr + row)
    pull = tl.where(inside, ce_weight, 0.0)
    for start in range(0, v, BLOCK):
        columns = start + lanes
        p = tl.exp(_load(draft_row, log_weight_ptr, columns, columns < v, WEIGHTED) - draft_top) / draft_total
        q = tl.exp(_load(target_row, log_weight_ptr, columns, columns < v, WEIGHTED) - target_top) / target_total
        sign = tl.where(p > q, 1.0, tl.where(p < q, -1.0, 0.0))
        grad = p * ((sign - mean_sign) * tv_weight + pull) - tl.where(columns == label, pull, 0.0)
        tl.store(draft_row + columns, (grad * row_weight).to(logits_ptr.dtype.element_ty), mask=columns < v)


@on_kernels(distribution_loss_ref)
def distribution_loss(
    logits: torch.Tensor,  # [n, v]
    target_logits: torch.Tensor,  # [n, v]
    log_weight: torch.Tensor | None,  # [v]
    labels: torch.Tensor,  # [n] int64
    row_weights: torch.Tensor,  # [n]
    *,
    ce_weight: float,
    tv_weight: float,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return both losses of every row, and the gradient of their weighted sum.

    Args:
        logits: of the draft, contiguous, float32, float16 or bfloat16; on a GPU the gradient overwrites them.
        target_logits: likewise, but kept.
        log_weight: added to both logits; None = zeros.
        labels: column of the label, -1 = none: no cross-entropy for this row.
        row_weights: factor on the row's gradient.
        ce_weight: of the cross-entropy in the gradient.
        tv_weight: of the total variation in the gradient.

    Returns:
        ``(ce [n], tv [n])`` float32, and the gradient ``[n, v]`` in the dtype of ``logits``.
    """
    n, v = logits.shape
    ce, tv = torch.empty(2, n, dtype=torch.float32, device=logits.device)
    if n:
        _distribution_loss_kernel[(n,)](
            logits,
            target_logits,
            log_weight,
            labels,
            row_weights,
            ce,
            tv,
            v,
            ce_weight,
            tv_weight,
            WEIGHTED=log_weight is not None,
            BLOCK=_BLOCK,
            num_warps=8,
        )
    return ce, tv, logits
