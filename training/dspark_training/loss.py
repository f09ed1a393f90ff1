"""Training objective of the drafter: cross-entropy, total variation and confidence (DSpark paper, section 3; DeepSpec).

Over the supervised slots, with z the Markov-corrected teacher-forced draft logits, p_d = softmax(z), p_t the target's
distribution at temperature 1 and y the text's own token::

    L      = ce * L_ce + l1 * L_tv + confidence * L_conf
    L_ce   = -log p_d(y)
    L_tv   = sum_v |p_d(v) - p_t(v)|
    L_conf = BCE(sigmoid(c), c*),   c* = 1 - L_tv / 2, held constant

each the mean over the slots of a batch, slot j of a block with the weight ``exp(-j / position_decay)``. DeepSpec has 4
there, and the DSpark paper gamma.

A selector chooses among the tokens whose base logits are best. p_d of all others is 0, and a slot whose y is one of
them has no L_ce. The base logits have to rank well by themselves: ``ce * L_ce + l1 * L_tv`` of their softmax is added.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from dspark_kernels import distribution_loss
from torch import Tensor, nn

from dspark_training.anchors import AnchorBatch
from dspark_training.block_forward import block_hidden, block_latents, context_kv
from dspark_training.loss_vocabulary import VocabularySlice
from dspark_training.settings import LossWeights
from sglang_dspark.draft.model import DraftModel

# Rows of logits handled at a time on a CPU: 256 x 7168 float32 stay in a 32 MiB cache across the passes of
# `distribution_loss_ref`. On a GPU small chunks save nothing, and each takes launches: 256 MiB of 16-bit logits there.
_CHUNK_ROWS = 256
_CHUNK_ELEMENTS = 2**27


@dataclass(frozen=True)
class LossOutput:
    """Loss of one batch and what it is made of: weighted means over its slots."""

    loss: Tensor  # scalar, differentiable
    ce: Tensor  # scalar
    l1: Tensor  # scalar
    confidence: Tensor  # scalar
    acceptance: Tensor  # [bs, A, gamma] expected acceptance c*, 0 where not supervised
    weight: Tensor  # scalar, what the means are divided by


def draft_loss(
    model: DraftModel,
    batch: AnchorBatch,
    vocabulary: VocabularySlice,
    target_lm_head: Tensor,  # [V, d]
    weights: LossWeights,
) -> LossOutput:
    """Return the loss of the draft model on `batch`, teacher-forced.

    It is differentiable in all parameters of the model but those of the LM head.
    """
    hidden = block_hidden(model, *context_kv(model, batch.features), batch.anchors, batch.anchor_ids)
    slots = batch.slots
    gamma = model.config.gamma
    latents = w1_embeddings = markov_w2 = None
    if model.markov_head is not None:
        latents, w1_embeddings = (
            x.flatten(0, 1)[slots] for x in block_latents(model, batch.prev_ids.flatten(0, 1), hidden.flatten(0, 1))
        )
        markov_w2 = vocabulary.rows(model.markov_head.markov_w2.weight)
    hidden = hidden.flatten(0, 2)[slots]
    lm_head, labels = vocabulary.rows(model.lm_head_weight), vocabulary.locate(batch.labels.flatten()[slots])
    slot_weights = torch.exp(-(slots % gamma) / weights.position_decay)
    weight = slot_weights.sum()
    slot_weights = slot_weights / weight
    ce, l1, distribution_loss = _DistributionLoss.apply(
        hidden,
        latents,
        markov_w2,
        lm_head,
        batch.target_hidden,
        vocabulary.rows(target_lm_head),
        vocabulary.log_weight,
        labels,
        slot_weights,
        weights,
        model.config.selector_top_k,
    )
    expected = (1 - l1 / 2).clamp(0, 1)
    confidence = hidden.new_zeros((), dtype=torch.float32)
    if model.confidence_head is not None:
        logits = model.confidence_head(hidden, w1_embeddings)
        confidence = (F.binary_cross_entropy_with_logits(logits, expected, reduction="none") * slot_weights).sum()
    acceptance = expected.new_zeros(batch.supervised.numel()).index_copy(0, slots, expected)
    return LossOutput(
        loss=distribution_loss + weights.confidence * confidence,
        ce=(ce * slot_weights).sum(),
        l1=(l1 * slot_weights).sum(),
        confidence=confidence.detach(),
        acceptance=acceptance.view(batch.supervised.shape),
        weight=weight,
    )


class Objective(nn.Module):
    """The drafter and its loss as one module: accelerate wraps the whole forward pass of a training step.

    Args:
        model: bound to the target's embedding and LM head.
        target_lm_head: ``[V, d]``, constant.
    """

    def __init__(self, model: DraftModel, target_lm_head: Tensor, weights: LossWeights) -> None:
        super().__init__()
        self.model = model
        self._constants = (target_lm_head, weights)  # a tensor of its own would be copied to every process

    def forward(self, batch: AnchorBatch, vocabulary: VocabularySlice) -> LossOutput:
        """Return the loss of `batch` over the tokens of `vocabulary`."""
        return draft_loss(self.model, batch, vocabulary, *self._constants)


class _DistributionLoss(torch.autograd.Function):
    """``ce * L_ce + l1 * L_tv`` with its gradient, computed chunk by chunk so that no ``[slots, v]`` tensor is kept.

    Returns ``(L_ce [n], L_tv [n], weighted sum)``; only the weighted sum is differentiable, and only it has the loss
    of a selector's base logits. The gradient of the logits is ``p - onehot(y)`` for the first term and ``p * (s -
    sum(p * s))``, s = sign(p - q), for the second; on a GPU one Triton kernel computes it.
    """

    @staticmethod
    def forward(  # noqa: PLR0913 - autograd takes tensors one by one
        ctx: Any,
        hidden: Tensor,  # [n, d]
        latents: Tensor | None,  # [n, r]
        markov_w2: Tensor | None,  # [v, r]
        lm_head: Tensor,  # [v, d], constant
        target_hidden: Tensor,  # [n, d]
        target_lm_head: Tensor,  # [v, d]
        log_weight: Tensor | None,  # [v]
        labels: Tensor,  # [n] position in the slice, -1 = outside: no cross-entropy for this slot
        slot_weights: Tensor,  # [n]
        weights: LossWeights,
        selector_top_k: int | None,
    ) -> tuple[Tensor, Tensor, Tensor]:
        device = hidden.device.type
        compute_dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else hidden.dtype
        with torch.autocast(device, enabled=False):
            head, target_head = lm_head.to(compute_dtype), target_lm_head.to(compute_dtype)
            w2 = None if markov_w2 is None else markov_w2.to(compute_dtype)
            ce = torch.empty(len(hidden), dtype=torch.promote_types(hidden.dtype, torch.float32), device=hidden.device)
            l1 = torch.empty_like(ce)
            total = ce.new_zeros(())
            hidden_grad = torch.zeros_like(hidden)
            latents_grad = None if latents is None else torch.empty_like(latents)
            w2_grad = None if markov_w2 is None else torch.zeros_like(markov_w2, dtype=torch.float32)
            chunk_rows = _CHUNK_ROWS if hidden.is_cpu else max(_CHUNK_ROWS, _CHUNK_ELEMENTS // len(head))
            for start in range(0, len(hidden), chunk_rows):
                part = slice(start, start + chunk_rows)
                target_logits = F.linear(target_hidden[part].to(compute_dtype), target_head)
                bias = None if latents is None or w2 is None else (latents[part].to(compute_dtype), w2)
                for logits, at, factors in _draft_logits(hidden[part], bias, head, labels[part], selector_top_k):
                    ce[part], l1[part], grad = distribution_loss(
                        logits,
                        target_logits,
                        log_weight,
                        at,
                        slot_weights[part],
                        ce_weight=weights.ce,
                        tv_weight=weights.l1,
                    )
                    total += ((weights.ce * ce[part] + weights.l1 * l1[part]) * slot_weights[part]).sum()
                    hidden_grad[part] += (grad @ head).to(hidden.dtype)
                    if factors is not None and latents_grad is not None and w2_grad is not None:
                        latents_grad[part] = (grad @ factors[1]).to(latents_grad.dtype)
                        w2_grad += grad.T @ factors[0]
        ctx.save_for_backward(hidden_grad, latents_grad, w2_grad)
        ctx.mark_non_differentiable(ce, l1)
        return ce, l1, total

    @staticmethod
    def backward(ctx: Any, ce_grad: Any, l1_grad: Any, loss_grad: Tensor) -> tuple[Tensor | None, ...]:
        scaled = [None if grad is None else grad * loss_grad for grad in ctx.saved_tensors]
        return (*scaled, *[None] * 8)


_Bias = tuple[Tensor, Tensor]
"""Latents ``[rows, r]`` and markov_w2 ``[v, r]``, in the dtype of the logits."""


def _draft_logits(
    hidden: Tensor,  # [rows, d]
    bias: _Bias | None,
    lm_head: Tensor,  # [v, d]
    labels: Tensor,  # [rows]
    selector_top_k: int | None,
) -> Iterator[tuple[Tensor, Tensor, _Bias | None]]:
    """Yield logits ``[rows, v]`` that have a loss, their labels, and the bias that is in them: those of drafts last."""
    logits = F.linear(hidden.to(lm_head.dtype), lm_head)
    if selector_top_k is not None:
        listed = logits.topk(min(selector_top_k, len(lm_head))).indices
        yield logits.clone(), labels, None
    if bias is not None:
        logits.addmm_(bias[0], bias[1].T)
    if selector_top_k is not None:
        logits = torch.full_like(logits, float("-inf")).scatter_(-1, listed, logits.gather(-1, listed))
        labels = labels.where((listed == labels[:, None]).any(-1), -1)
    yield logits, labels, bias
