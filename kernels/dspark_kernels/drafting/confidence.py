"""Confidences of drafts, and the cumulative acceptance that follows from them.

The logits of a drafted block are w . [h_k ; W1[x_{k-1}]] + b in float32 (DSpark, Eq. 7).

A slot whose chain of candidates is alive has at least the chain's: the head does not know it.

Survivals are the running products of calibrated confidences (DSpark, Eq. 9): one launch where torch has six. Bytes: 4
per draft read and 4 written; the launch is the cost.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
import triton
import triton.language as tl

from dspark_kernels.dispatch import on_kernels
from dspark_kernels.drafting.heads import FOLLOWED, Candidates, ConfidenceWeights

_BLOCK_D = 1024
_FOLLOWED = tl.constexpr(FOLLOWED)


def block_confidence_ref(
    hidden: torch.Tensor,  # [bs, gamma, d]
    anchors: torch.Tensor,  # [bs] int64
    tokens: torch.Tensor,  # [bs, gamma] int64
    weights: ConfidenceWeights,
    w1: torch.Tensor | None,  # [V, r]
    candidates: Candidates | None = None,
) -> torch.Tensor:
    """Compute the same as :func:`block_confidence` in plain torch."""
    _check(hidden, weights, w1)
    features = hidden.float()
    if weights.weight.shape[0] > hidden.shape[-1]:
        assert w1 is not None
        previous = torch.cat((anchors[:, None], tokens[:, :-1]), dim=1)
        features = torch.cat((features, F.embedding(previous, w1).float()), dim=-1)
    logits = F.linear(features, weights.weight.float()[None], weights.bias.float()).squeeze(-1)
    return logits if candidates is None else candidates.sure(logits)


# Depths change from step to step; each would compile the kernel again.
@triton.jit(do_not_specialize=["gamma", "chains_stride", "weights_stride"])
def _block_confidence_kernel(
    hidden_ptr,
    anchors_ptr,
    tokens_ptr,
    weight_ptr,
    bias_ptr,
    w1_ptr,
    out_ptr,
    chains_ptr,  # [bs, chains_stride] int64; None without candidates
    chains_stride,
    least_ptr,  # [M + 1, weights_stride] float32
    weights_stride,
    gamma,
    HIDDEN: tl.constexpr,
    RANK: tl.constexpr,  # 0: no Markov embedding
    BLOCK_D: tl.constexpr,
    BLOCK_R: tl.constexpr,  # >= RANK
):
    row = tl.program_id(0).to(tl.int64)
    dims = tl.arange(0, BLOCK_D)
    total = tl.zeros([BLOCK_D], tl.float32)
    for start in range(0, HIDDEN, BLOCK_D):
        inside = start + dims < HIDDEN
        hidden = tl.load(hidden_ptr + row * HIDDEN + start + dims, mask=inside, other=0.0).to(tl.float32)
        total += hidden * tl.load(weight_ptr + start + dims, mask=inside, other=0.0).to(tl.float32)
    logit = tl.sum(total, 0) + tl.load(bias_ptr).to(tl.float32)
    if RANK > 0:
        is_first = row % gamma == 0
        anchor = tl.load(anchors_ptr + row // gamma)
        previous = tl.where(is_first, anchor, tl.load(tokens_ptr + row - 1, mask=row > 0, other=0))
        ranks = tl.arange(0, BLOCK_R)
        inside = ranks < RANK
        embedding = tl.load(w1_ptr + previous * RANK + ranks, mask=inside, other=0.0).to(tl.float32)
        weight = tl.load(weight_ptr + HIDDEN + ranks, mask=inside, other=0.0).to(tl.float32)
        logit += tl.sum(embedding * weight, 0)
    if chains_ptr is not None:
        chain = chains_ptr + row // gamma * chains_stride
        slot = row % gamma
        least = tl.load(least_ptr + tl.load(chain) * weights_stride + slot)
        logit = tl.where(tl.load(chain + _FOLLOWED) >= slot, tl.maximum(logit, least), logit)
    tl.store(out_ptr + row, logit)


@on_kernels(block_confidence_ref)
def block_confidence(
    hidden: torch.Tensor,  # [bs, gamma, d]
    anchors: torch.Tensor,  # [bs] int64
    tokens: torch.Tensor,  # [bs, gamma] int64
    weights: ConfidenceWeights,
    w1: torch.Tensor | None,  # [V, r]
    candidates: Candidates | None = None,
) -> torch.Tensor:
    """Compute the raw confidence logits of a whole block in one launch.

    Args:
        hidden: post-norm hidden states, any float dtype.
        anchors: the tokens before slot 0.
        tokens: the block's tokens; the last one is not read.
        weights: the head; its length says whether it reads Markov embeddings.
        w1: Markov embeddings; may be None when the head does not read them.
        candidates: whose chains the block has followed; None for none.

    Returns:
        [bs, gamma] float32. No host sync; safe under graph capture.

    Raises:
        ValueError: the head reads Markov embeddings of another width than W1 has.
    """
    bs, gamma, width = hidden.shape
    rank = _check(hidden, weights, w1)
    out = torch.empty((bs, gamma), dtype=torch.float32, device=hidden.device)
    _block_confidence_kernel[(bs * gamma,)](
        hidden.contiguous(),
        anchors.contiguous(),
        tokens.contiguous(),
        weights.weight,
        weights.bias,
        w1,
        out,
        None if candidates is None else candidates.chains,
        0 if candidates is None else candidates.chains.stride(0),
        None if candidates is None else candidates.weights[1],
        0 if candidates is None else candidates.weights.stride(1),
        gamma,
        HIDDEN=width,
        RANK=rank,
        BLOCK_D=min(_BLOCK_D, triton.next_power_of_2(width)),
        BLOCK_R=triton.next_power_of_2(max(rank, 1)),
    )
    return out


def _check(hidden: torch.Tensor, weights: ConfidenceWeights, w1: torch.Tensor | None) -> int:
    """Return the rank of the Markov embeddings that the head reads, 0 for none."""
    width = hidden.shape[-1]
    rank = weights.weight.shape[0] - width
    if rank != 0 and (w1 is None or w1.shape[1] != rank):
        raise ValueError(
            f"the confidence head has {weights.weight.shape[0]} weights for {width} hidden channels, W1 has shape "
            f"{None if w1 is None else tuple(w1.shape)}; pass the W1 of the same checkpoint"
        )
    return rank


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
