"""The torch walk through a draft block: base logits plus the Markov head's bias, token by token.

logits_k = U_k + B_k(x_{k-1}) and x_k is drawn from the locally normalised p_d = softmax(logits_k / T), so the exact p_d
that verification divides by is the very tensor the token was drawn from (DSpark, section 3.1 and Eqs. 4-7).
"""

from __future__ import annotations

import torch

from dspark_kernels.drafting.candidates import OUTRIGHT, Candidates
from dspark_kernels.drafting.confidence import block_confidence_ref
from dspark_kernels.drafting.drafted_block import DraftBlock
from dspark_kernels.drafting.heads import DraftHeads, DraftVocabulary, MarkovWalk
from dspark_kernels.drafting.shortlist import competing_columns, log_odds
from dspark_kernels.sampling.noise import Purpose, RoundKeys
from dspark_kernels.sampling.parameters import SamplingBatch
from dspark_kernels.sampling.target_distribution import reads_are_free
from dspark_kernels.sampling.token_draw import draw_by_rule


def draft_block_ref(
    base_logits: torch.Tensor,  # [bs, gamma, v]
    hidden: torch.Tensor,  # [bs, gamma, d]
    anchors: torch.Tensor,  # [bs] int64
    heads: DraftHeads,
    rows: SamplingBatch,
    keys: RoundKeys,
    candidates: Candidates | None = None,
    *,
    with_confidence: bool = True,
) -> DraftBlock:
    """Draft a block in plain torch, by each request's own temperature and filters.

    Arguments and errors are those of :func:`dspark_kernels.draft_block`.

    Returns:
        The block, with ``probs`` if a request is sampled. Corrected logits are float32; no host sync.
    """
    gamma, vocabulary = base_logits.shape[1], heads.vocabulary
    competing = competing_columns(base_logits, heads, candidates)
    uniforms = keys.block_uniform(gamma, Purpose.DRAFT) if rows.any_sampled else None
    walk = None if heads.markov is None else MarkovWalk(heads.markov, hidden)
    offers = None if candidates is None else _Offers(candidates, vocabulary, rows, gamma)
    if offers is not None and offers.none:
        offers = None
    previous, drafted, drawn_from, odds = anchors, [], [], []
    for k in range(gamma):
        logits = base_logits[:, k]
        if walk is not None:
            logits = walk.corrected(previous, logits, None if competing is None else competing[:, k])
        if competing is not None and heads.confidence is None and with_confidence:
            odds.append(log_odds(logits, competing[:, k], heads))
        if offers is not None:
            logits = offers.boosted(k, logits)
        if vocabulary is not None and rows.all_greedy:
            previous = vocabulary.token_ids[logits.argmax(-1)]
        else:
            # The distributions of sampled and seeded requests, and their noise, are over all tokens.
            whole = logits if vocabulary is None else vocabulary.spread(logits)
            slot_uniforms = None if uniforms is None else uniforms[:, k]
            previous, sampled_probs = draw_by_rule(whole, rows, slot_uniforms, keys.positions + k)
            if sampled_probs is not None:
                drawn_from.append(sampled_probs)
        if offers is not None:
            previous = offers.drafts(k, previous)
        drafted.append(previous)
    tokens = torch.stack(drafted, dim=1)
    if candidates is not None:
        candidates.follow(tokens)
    confidence_logits = None
    if heads.confidence is not None and with_confidence:
        confidence_logits = block_confidence_ref(hidden, anchors, tokens, heads.confidence, heads.w1, candidates)
    elif odds:
        confidence_logits = torch.stack(odds, dim=1)
        confidence_logits = confidence_logits if candidates is None else candidates.sure(confidence_logits)
    probs = _by_request(torch.stack(drawn_from, dim=1), rows) if drawn_from else None
    block = DraftBlock(tokens, probs, confidence_logits)
    return block if candidates is None else block.with_candidates(candidates, vocabulary, rows)


class _Offers:
    """Hold what candidates offer to the walk through a block.

    Args:
        depth: of the block.

    Attributes:
        none: whether nothing weighs anything, where the host may see that.
    """

    def __init__(
        self, candidates: Candidates, vocabulary: DraftVocabulary | None, rows: SamplingBatch, depth: int
    ) -> None:
        self._tokens, nats, columns = candidates.offers(depth, vocabulary)
        self.none = reads_are_free(nats) and not nats.any()
        has_column = columns >= 0
        self._outright = ~has_column & (self._tokens >= 0) & (nats >= OUTRIGHT)
        self._columns = columns.clamp_min(0)
        # Nats at the request's temperature, which logits have yet to be divided by.
        temperatures = rows.draw_temperatures
        self._boosts = nats.where(has_column, 0.0) * torch.where(temperatures > 0, temperatures, 1.0)[:, None]
        self._alive = torch.ones_like(temperatures, dtype=torch.bool)

    def boosted(self, slot: int, logits: torch.Tensor) -> torch.Tensor:
        """Return logits [bs, v] with those of a slot's candidates raised."""
        boosts = (self._boosts[:, slot] * self._alive)[:, None].to(logits.dtype)
        return logits.scatter_add(1, self._columns[:, slot, None], boosts)

    def drafts(self, slot: int, drawn: torch.Tensor) -> torch.Tensor:
        """Return the drafts [bs] of a slot: those drawn, and candidates that cannot be."""
        drafts = torch.where(self._outright[:, slot] & self._alive, self._tokens[:, slot], drawn)
        self._alive = self._alive & (drafts == self._tokens[:, slot])
        return drafts


def _by_request(sampled_probs: torch.Tensor, rows: SamplingBatch) -> torch.Tensor:
    """Spread the sampled requests' [num_sampled, gamma, V] over the batch, [bs, gamma, V]."""
    if sampled_probs.shape[0] == len(rows):
        return sampled_probs
    probs = sampled_probs.new_empty((len(rows), *sampled_probs.shape[1:]))
    probs[rows.sampled_index] = sampled_probs
    return probs
