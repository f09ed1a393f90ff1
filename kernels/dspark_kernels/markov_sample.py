"""Sampling a draft block left to right: base logits plus the sequential head's bias, token by token.

logits_k = U_k + B_k(x_{k-1}) and x_k is drawn from the locally normalised p_d = law(logits_k), so the exact p_d that
verification divides by is the very tensor the token was drawn from (DSpark, section 3.1 and Eqs. 4-7).

Any law is lossless as long as it is the stored one; tokens that the target's filters forbid are only rejected. The
torch walk (``markov_sample_ref``) applies the request's own temperature and filters. The kernels
(``markov_walk``) apply the temperature alone: a filter needs the whole row before the first token
can be drawn, and what it costs to go without is some acceptance under narrow filters.
"""

from __future__ import annotations

from typing import Protocol

import torch
import triton

from .draft_block import DraftBlock, DraftVocabulary
from .markov_walk import WalkWeights, markov_walk
from .noise import Purpose, RoundKeys
from .sampling_params import SamplingRows
from .token_draw import draw_by_rule


class MarkovHead(Protocol):
    """A sequential head: the bias of slot k given the token before it."""

    def initial_state(self, bs: int, device: torch.device, dtype: torch.dtype) -> torch.Tensor | None: ...

    def step(
        self,
        prev_tokens: torch.Tensor,  # [bs] int64
        hidden: torch.Tensor,  # [bs, d]
        state: torch.Tensor | None,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:  # bias [bs, V], W1 embedding [bs, r], next state
        ...


class ConfidenceHead(Protocol):
    """Maps post-norm hidden [..., d] and the previous token's W1 embedding [..., r] (or None) to logits [...]."""

    def __call__(self, hidden: torch.Tensor, w1_embedding: torch.Tensor | None) -> torch.Tensor: ...


def markov_sample_ref(
    base_logits: torch.Tensor,  # [bs, gamma, V]
    hidden: torch.Tensor,  # [bs, gamma, d]
    anchors: torch.Tensor,  # [bs] int64
    markov: MarkovHead | None,
    confidence: ConfidenceHead | None,
    rows: SamplingRows,
    keys: RoundKeys,
    vocabulary: DraftVocabulary | None = None,
) -> DraftBlock:
    """Walk the block once, drawing each token from the logits its predecessor corrects.

    Args:
        base_logits: the draft backbone's logits, any float dtype, not modified.
        hidden: post-norm hidden states, the heads' input.
        anchors: the last committed token of each request, predecessor of slot 0.
        markov: the sequential head, or None for independent slots.
        confidence: the confidence head, or None.
        rows: sampling parameters of the bs requests.
        keys: noise keys of this round; slot k is drawn at position ``keys.positions + k``.
        vocabulary: the tokens that the columns of ``base_logits`` and of the bias stand for; None = all, in order.

    Returns:
        The block. Corrected logits are float32; no host sync.
    """
    bs, gamma, _ = base_logits.shape
    uniforms = keys.block_uniform(gamma, Purpose.DRAFT) if rows.any_sampled else None
    state = markov.initial_state(bs, hidden.device, hidden.dtype) if markov is not None else None
    tokens, w1_embeddings, drawn_from = [anchors], [], []
    for k in range(gamma):
        logits = base_logits[:, k]
        if markov is not None:
            bias, w1_embedding, state = markov.step(tokens[-1], hidden[:, k], state)
            w1_embeddings.append(w1_embedding)
            logits = logits.float() + bias  # float32 whatever the bias's dtype
        if vocabulary is not None and rows.all_greedy:
            tokens.append(vocabulary.token_ids[logits.argmax(-1)])
            continue
        if vocabulary is not None:
            # The laws of sampled and seeded requests, and their noise, are over all tokens.
            logits = vocabulary.spread(logits)
        slot_uniforms = None if uniforms is None else uniforms[:, k]
        slot_tokens, sampled_probs = draw_by_rule(logits, rows, slot_uniforms, keys.positions + k)
        tokens.append(slot_tokens)
        if sampled_probs is not None:
            drawn_from.append(sampled_probs)
    confidence_logits = None
    if confidence is not None:
        confidence_logits = confidence(hidden, torch.stack(w1_embeddings, dim=1) if w1_embeddings else None)
    return DraftBlock(
        tokens=torch.stack(tokens[1:], dim=1),
        probs=_by_request(torch.stack(drawn_from, dim=1), rows) if drawn_from else None,
        confidence_logits=confidence_logits,
    )


def _by_request(sampled_probs: torch.Tensor, rows: SamplingRows) -> torch.Tensor:
    """Spread the sampled requests' [num_sampled, gamma, V] over the batch, [bs, gamma, V]."""
    if sampled_probs.shape[0] == len(rows):
        return sampled_probs
    probs = sampled_probs.new_empty((len(rows), *sampled_probs.shape[1:]))
    probs[rows.sampled_index] = sampled_probs
    return probs


def markov_sample(
    base_logits: torch.Tensor,  # [bs, gamma, v]
    hidden: torch.Tensor,  # [bs, gamma, d]
    anchors: torch.Tensor,  # [bs] int64
    markov: MarkovHead | None,
    confidence: ConfidenceHead | None,
    rows: SamplingRows,
    keys: RoundKeys,
    vocabulary: DraftVocabulary | None = None,
    weights: WalkWeights | None = None,
) -> DraftBlock:
    """Walk the block once, with kernels on a GPU.

    Args:
        weights: the tensors of ``markov`` and ``confidence``, which the kernels read; None walks in torch. The others
            are those of :func:`markov_sample_ref`.

    Returns:
        The block. From the kernels a sampled request's distribution is in ``law``, otherwise in ``probs``. No host
        sync.
    """
    on_kernels = base_logits.is_cuda or triton.knobs.runtime.interpret
    if weights is None or not on_kernels:
        return markov_sample_ref(base_logits, hidden, anchors, markov, confidence, rows, keys, vocabulary)
    return markov_walk(
        base_logits,
        hidden,
        anchors,
        weights,
        None if rows.all_greedy else rows.draw_temperatures,
        keys,
        vocabulary,
        seeds=(rows.seeds, rows.is_seeded) if rows.any_seeded else None,
        any_sampled=rows.any_sampled,
        with_confidence=confidence is not None,
    )
