"""The torch walk through a draft block: base logits plus the Markov head's bias, token by token.

logits_k = U_k + B_k(x_{k-1}) and x_k is drawn from the locally normalised p_d = softmax(logits_k / T), so the exact p_d
that verification divides by is the very tensor the token was drawn from (DSpark, section 3.1 and Eqs. 4-7).
"""

from __future__ import annotations

import torch

from dspark_kernels.drafting.confidence import block_confidence_ref
from dspark_kernels.drafting.drafted_block import DraftBlock
from dspark_kernels.drafting.heads import DraftHeads, MarkovWalk
from dspark_kernels.sampling.noise import Purpose, RoundKeys
from dspark_kernels.sampling.parameters import SamplingBatch
from dspark_kernels.sampling.token_draw import draw_by_rule


def draft_block_ref(
    base_logits: torch.Tensor,  # [bs, gamma, v]
    hidden: torch.Tensor,  # [bs, gamma, d]
    anchors: torch.Tensor,  # [bs] int64
    heads: DraftHeads,
    rows: SamplingBatch,
    keys: RoundKeys,
    *,
    with_confidence: bool = True,
) -> DraftBlock:
    """Draft a block in plain torch, by each request's own temperature and filters.

    Arguments and errors are those of :func:`dspark_kernels.draft_block`.

    Returns:
        The block, with ``probs`` where a request is sampled. Corrected logits are float32; no host sync.
    """
    gamma, vocabulary = base_logits.shape[1], heads.vocabulary
    uniforms = keys.block_uniform(gamma, Purpose.DRAFT) if rows.any_sampled else None
    walk = None if heads.markov is None else MarkovWalk(heads.markov, hidden)
    previous, drafted, drawn_from = anchors, [], []
    for k in range(gamma):
        logits = base_logits[:, k]
        if walk is not None:
            logits = logits.float() + walk.bias(previous)  # float32 whatever the bias's dtype
        if vocabulary is not None and rows.all_greedy:
            previous = vocabulary.token_ids[logits.argmax(-1)]
        else:
            # The distributions of sampled and seeded requests, and their noise, are over all tokens.
            whole = logits if vocabulary is None else vocabulary.spread(logits)
            slot_uniforms = None if uniforms is None else uniforms[:, k]
            previous, sampled_probs = draw_by_rule(whole, rows, slot_uniforms, keys.positions + k)
            if sampled_probs is not None:
                drawn_from.append(sampled_probs)
        drafted.append(previous)
    tokens = torch.stack(drafted, dim=1)
    confidence_logits = None
    if heads.confidence is not None and with_confidence:
        confidence_logits = block_confidence_ref(hidden, anchors, tokens, heads.confidence, heads.w1)
    probs = _by_request(torch.stack(drawn_from, dim=1), rows) if drawn_from else None
    return DraftBlock(tokens, probs, confidence_logits)


def _by_request(sampled_probs: torch.Tensor, rows: SamplingBatch) -> torch.Tensor:
    """Spread the sampled requests' [num_sampled, gamma, V] over the batch, [bs, gamma, V]."""
    if sampled_probs.shape[0] == len(rows):
        return sampled_probs
    probs = sampled_probs.new_empty((len(rows), *sampled_probs.shape[1:]))
    probs[rows.sampled_index] = sampled_probs
    return probs
