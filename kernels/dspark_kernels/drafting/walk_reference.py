"""The torch walk through a draft block: base logits plus the Markov head's bias, token by token.

logits_k = U_k + B_k(x_{k-1}) and x_k is drawn from the locally normalised p_d = softmax(logits_k / T), so the exact p_d
that verification divides by are the very numbers the token was drawn with (DSpark, section 3.1 and Eqs. 4-7).
"""

from __future__ import annotations

import torch

from dspark_kernels.drafting.candidates import OUTRIGHT, Candidates
from dspark_kernels.drafting.confidence import block_confidence_ref
from dspark_kernels.drafting.draft_distribution import LEAST_TEMPERATURE, DraftDistribution
from dspark_kernels.drafting.drafted_block import DraftBlock
from dspark_kernels.drafting.heads import DraftHeads, DraftVocabulary, MarkovWalk
from dspark_kernels.drafting.shortlist import competing_columns, log_odds
from dspark_kernels.sampling.noise import Purpose, RoundKeys
from dspark_kernels.sampling.parameters import SamplingBatch
from dspark_kernels.sampling.target_distribution import reads_are_free
from dspark_kernels.sampling.token_draw import seeded_argmax


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
    """Draft a block in plain torch; :func:`dspark_kernels.draft_block` says what is what. No host sync."""
    gamma, vocabulary = base_logits.shape[1], heads.vocabulary
    competing = competing_columns(base_logits, heads, candidates)
    draws = _Draws(rows, keys, vocabulary, gamma)
    walk = None if heads.markov is None else MarkovWalk(heads.markov, hidden)
    offers = None if candidates is None else _Offers(candidates, vocabulary, gamma)
    if offers is not None and offers.none:
        offers = None
    previous, drafted, odds = anchors, [], []
    for k in range(gamma):
        if walk is None:
            logits = base_logits[:, k].float()
        else:
            logits = walk.corrected(previous, base_logits[:, k], None if competing is None else competing[:, k])
        if competing is not None and heads.confidence is None and with_confidence:
            odds.append(log_odds(logits, competing[:, k], heads))
        scores = draws.scores(logits)
        previous = draws.tokens(k, scores if offers is None else offers.boosted(k, scores))
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
    block = DraftBlock(tokens, confidence_logits, draws.distribution())
    return block if candidates is None else block.with_candidates(candidates, vocabulary, rows)


class _Draws:
    """Draw the tokens of a block slot by slot, each request by its own rule, and keep what they were drawn from."""

    def __init__(self, rows: SamplingBatch, keys: RoundKeys, vocabulary: DraftVocabulary | None, depth: int) -> None:
        self._rows, self._keys, self._vocabulary = rows, keys, vocabulary
        if rows.any_sampled:
            self._uniforms = keys.block_uniform(depth, Purpose.DRAFT)
        self._drawn_from: list[tuple[torch.Tensor, torch.Tensor]] = []

    def scores(self, logits: torch.Tensor) -> torch.Tensor:
        """Return logits [bs, v] divided by the temperature; not of greedy requests."""
        if self._rows.all_greedy:
            return logits
        temperatures = self._rows.draw_temperatures
        sharpness = 1.0 / temperatures.clamp_min(LEAST_TEMPERATURE)
        return logits * sharpness.masked_fill(temperatures == 0, 1.0)[:, None]

    def tokens(self, slot: int, scores: torch.Tensor) -> torch.Tensor:
        """Return the tokens [bs] of a slot with these scores [bs, v]."""
        rows, keys, vocabulary = self._rows, self._keys, self._vocabulary
        columns = scores.argmax(-1) if rows.any_greedy else keys.positions.new_zeros(len(rows))
        if rows.any_sampled:
            index = rows.sampled_index
            of_sampled = rows.select(scores, index)
            log_norms = of_sampled.logsumexp(-1)
            self._drawn_from.append((of_sampled, log_norms))
            weights = torch.exp(of_sampled - log_norms[:, None])
            columns[index] = keys.drawn(weights, rows.select(self._uniforms[:, slot], index))
        tokens = columns if vocabulary is None else vocabulary.token_ids[columns]
        if rows.any_seeded:
            index = rows.seeded_index
            of_seeded = rows.select(scores, index)
            whole = of_seeded if vocabulary is None else vocabulary.spread(of_seeded)
            positions = keys.positions[index] + slot
            tokens[index] = seeded_argmax(whole.softmax(-1), rows.seeds[index], positions)
        return tokens

    def distribution(self) -> DraftDistribution | None:
        """Return what the tokens of sampled requests were drawn from."""
        if not self._drawn_from:
            return None
        scores, log_norms = (torch.stack(parts, dim=1) for parts in zip(*self._drawn_from, strict=True))
        found = DraftDistribution(scores, log_norms, None if self._vocabulary is None else self._vocabulary.columns)
        index, bs = self._rows.sampled_index, len(self._rows)
        return found if len(index) == bs else found.spread(index, bs)


class _Offers:
    """Hold what candidates offer to the walk through a block.

    Args:
        depth: of the block.

    Attributes:
        none: whether nothing weighs anything, where the host may see that.
    """

    def __init__(self, candidates: Candidates, vocabulary: DraftVocabulary | None, depth: int) -> None:
        self._tokens, nats, columns = candidates.offers(depth, vocabulary)
        self.none = reads_are_free(nats) and not nats.any()
        has_column = columns >= 0
        self._outright = ~has_column & (self._tokens >= 0) & (nats >= OUTRIGHT)
        self._columns = columns.clamp_min(0)
        self._boosts = nats.where(has_column, 0.0)
        self._alive = torch.ones(len(nats), dtype=torch.bool, device=nats.device)

    def boosted(self, slot: int, scores: torch.Tensor) -> torch.Tensor:
        """Return scores [bs, v] with those of a slot's candidates raised."""
        boosts = (self._boosts[:, slot] * self._alive)[:, None].to(scores.dtype)
        return scores.scatter_add(1, self._columns[:, slot, None], boosts)

    def drafts(self, slot: int, drawn: torch.Tensor) -> torch.Tensor:
        """Return the drafts [bs] of a slot: those drawn, and candidates that cannot be."""
        drafts = torch.where(self._outright[:, slot] & self._alive, self._tokens[:, slot], drawn)
        self._alive = self._alive & (drafts == self._tokens[:, slot])
        return drafts
