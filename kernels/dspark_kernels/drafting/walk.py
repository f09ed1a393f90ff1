"""The walk of the Markov head through a block of drafts, token by token: as kernels, and in torch.

Per slot, logits = U_k + W2 u in float32, with u = W1[x_{k-1}] or what the head makes of it; x_k is argmax(logits) for a
greedy request, argmax(logits / T - log E_k) with the noise of its own seed for a seeded one, and where the cumulative
distribution crosses a random number for a sampled one. Their distribution is softmax(logits / T): only temperature, no
top-k, top-p or min-p, for a filter needs the whole row before the first token can be drawn. Verification is exact for
every distribution that the drafts were really drawn from, so the price is some acceptance if the target's filters are
narrow.

What one block must move: W2 and the base logits once per slot, gamma * v * (r * sizeof(W2) + bs * sizeof(U)) bytes,
plus gamma * bs * v * 4 for the scores of sampled requests. W2 of 151,936 tokens and rank 256 in bfloat16 is 78 MB, more
than the 50 MB of L2 of an H200: 0.54 GB for gamma = 7, or 0.11 ms at 4.8 TB/s before the first request is counted. A
selector has a walk of its own (``shortlist``), which moves a row of W2 for each of the few tokens that compete.

In torch, logits_k = U_k + B_k(x_{k-1}) and x_k is drawn from the locally normalised p_d = softmax(logits_k / T), so the
exact p_d that verification divides by are the very numbers the token was drawn with (DSpark, section 3.1 and Eqs. 4-7).
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
import triton

from dspark_kernels.dispatch import num_processors, on_kernels, shared_bytes
from dspark_kernels.drafting.confidence import block_confidence, block_confidence_ref
from dspark_kernels.drafting.heads import (
    LEAST_TEMPERATURE,
    OUTRIGHT,
    Candidates,
    DraftBlock,
    DraftDistribution,
    DraftHeads,
    DraftVocabulary,
    MarkovWalk,
    MarkovWeights,
)
from dspark_kernels.drafting.layers import Int8Weight
from dspark_kernels.drafting.shortlist import choose_listed, competing_columns, log_odds
from dspark_kernels.drafting.walk_kernel import choose_kernel
from dspark_kernels.noise import Purpose, RoundKeys
from dspark_kernels.sampling import SamplingBatch, reads_are_free, seeded_argmax


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
    """Draw the tokens of a block slot by slot, each request with its own rule, and keep what they were drawn from."""

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


_MIN_DOT = 16  # smallest tile side of tl.dot
_MAX_BLOCK_B = 64  # requests that share one reading of a W2 tile; registers and shared memory end here
_BLOCK_V = 64
_BLOCK_R = {torch.float32: 32}  # products in full float32 keep their operands in registers
_MAX_BLOCK_R = 256
_FINISH_TILE = 2048  # partial results that the last program of a group takes at a time
_STAGES_BYTES = 147_456  # of shared memory that three stages of the largest tiles take


@on_kernels(draft_block_ref)
def draft_block(
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
    """Draft a block, drawing each token from the logits that its predecessor corrects.

    On a GPU one launch per slot, one to clear counters and one for the confidence logits; a gated or rnn head adds its
    own torch operations to every slot. A selector's block is one launch, after what finds its shortlists.

    Args:
        base_logits: the draft backbone's logits, not modified; float32, float16 or bfloat16, contiguous.
        hidden: post-norm hidden states, read by the confidence head and by all Markov heads but vanilla ones.
        anchors: the last committed token of each request, predecessor of slot 0.
        heads: the drafter's.
        rows: sampling parameters of the bs requests.
        keys: noise keys of this round; slot k is drawn at position ``keys.positions + k``. Under graph capture
            ``step`` must be a tensor, and the seed becomes a constant of the graph.
        candidates: compete with the drafter's own tokens, slot by slot; the walk counts in their chains.
        with_confidence: whether to compute confidence logits, if the drafter has that head.

    Returns:
        The block. Greedy ties go to the lowest column; NaN logits never win in kernels, where a row of nothing but NaN
        or -inf gives its first column. No host sync; safe under graph capture.

    Raises:
        ValueError: heads or logits do not fit together, or are not contiguous.
    """
    _check(base_logits, heads)
    distribution = _empty_distribution(base_logits, heads) if rows.any_sampled else None
    rule = _rule_args(heads, distribution, rows, keys, candidates)
    tokens = torch.empty(base_logits.shape[:2], dtype=torch.int64, device=base_logits.device)
    block, odds = DraftBlock(tokens, distribution=distribution), None
    if (competing := competing_columns(base_logits, heads, candidates)) is None:
        _walk(base_logits, hidden, anchors, heads, rule, block)
    else:
        odds = choose_listed(base_logits, hidden, anchors, heads, competing, rule, block)
    if heads.confidence is not None and with_confidence:
        odds = block_confidence(hidden, anchors, tokens, heads.confidence, heads.w1, candidates)
    block = replace(block, confidence_logits=odds if with_confidence else None)
    return block if candidates is None else block.with_candidates(candidates, heads.vocabulary, rows)


def _walk(
    base_logits: torch.Tensor,
    hidden: torch.Tensor,
    anchors: torch.Tensor,
    heads: DraftHeads,
    rule: dict[str, Any],
    block: DraftBlock,
) -> None:
    """Write tokens of ``block``, and the distribution of sampled requests, with one launch per slot."""
    (bs, gamma, v), device, markov = base_logits.shape, base_logits.device, heads.markov
    groups, programs, sizes = _division(base_logits, markov, shared_bytes(device))
    counters = torch.zeros((gamma, groups), dtype=torch.int32, device=device)
    shape = (groups, programs, sizes["BLOCK_B"])
    w2, w2_scales = _codes_and_scales(markov)
    shared = rule | {
        "w2_ptr": w2,
        "w2_scales_ptr": w2_scales,
        "partial_ptr": torch.empty((3, *shape), dtype=torch.float32, device=device),
        "partial_columns_ptr": torch.empty(shape, dtype=torch.int32, device=device),
        "log_norms_stride": gamma,
        "tokens_stride": gamma,
        "depth": gamma,
        "bs": bs,
        "v": v,
        "BY_TOKEN": markov is not None and markov.head is None,
        "SCALED": w2_scales is not None,
        **sizes,
    }
    tokens, distribution, latents = block.tokens, block.distribution, None
    walk = None if markov is None else MarkovWalk(markov, hidden)
    for k in range(gamma):
        previous = anchors if k == 0 else tokens[:, k - 1]
        if markov is not None and walk is not None:
            latents = markov.w1 if markov.head is None else walk.latent(previous).to(markov.w1.dtype).contiguous()
        choose_kernel[groups, programs](
            base_ptr=base_logits[:, k],
            prev_ptr=previous,
            prev_stride=previous.stride(0),
            latents_ptr=latents,
            scores_ptr=None if distribution is None else distribution.scores[:, k],
            log_norms_ptr=None if distribution is None else distribution.log_norms[:, k],
            tokens_ptr=tokens[:, k],
            counters_ptr=counters[k],
            slot=k,
            **shared,
        )


def _division(
    base_logits: torch.Tensor, markov: MarkovWeights | None, room: int
) -> tuple[int, int, dict[str, int | bool]]:
    """Return groups of requests, programs that share the vocabulary for each group, and constants of the launches.

    Args:
        room: bytes of shared memory for a program.
    """
    bs, _, v = base_logits.shape
    block_b = min(_MAX_BLOCK_B, max(_MIN_DOT, triton.next_power_of_2(bs)))
    groups, num_warps = triton.cdiv(bs, block_b), 8 if block_b == _MAX_BLOCK_B else 4
    # Each program has its share of the vocabulary, so more than run at the same time would only wait. In bfloat16 with
    # rank 256, registers and shared memory of sm_90 hold two of 4 warps and one of 8, and so do those of sm_89 in two
    # stages.
    residents = num_processors(base_logits.device) * (8 // num_warps)
    rank = 0 if markov is None else markov.w2.shape[1]
    max_block_r = _MAX_BLOCK_R if markov is None else _BLOCK_R.get(markov.w1.dtype, _MAX_BLOCK_R)
    return (
        groups,
        min(triton.cdiv(v, _BLOCK_V), max(1, residents // groups)),
        {
            "RANK": rank,
            "BLOCK_B": block_b,
            "BLOCK_V": _BLOCK_V,
            "BLOCK_R": min(max_block_r, max(_MIN_DOT, triton.next_power_of_2(rank))),
            "BLOCK_P": max(1, _FINISH_TILE // block_b),
            "num_warps": num_warps,
            "num_stages": 3 if room >= _STAGES_BYTES else 2,
            # Else the normaliser would be that of scores which are not rounded to the float32 that is stored and drawn.
            "enable_fp_fusion": False,
        },
    )


def _empty_distribution(base_logits: torch.Tensor, heads: DraftHeads) -> DraftDistribution:
    """Return a distribution to be written; of a selector, only what competes is."""
    vocabulary = heads.vocabulary
    scores = torch.empty(base_logits.shape, dtype=torch.float32, device=base_logits.device)
    if heads.shortlist is not None:
        scores.fill_(float("-inf"))
    log_norms = torch.empty(base_logits.shape[:2], dtype=torch.float32, device=base_logits.device)
    return DraftDistribution(scores, log_norms, None if vocabulary is None else vocabulary.columns)


def _codes_and_scales(markov: MarkovWeights | None) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """Return W2 as kernels read it: in its dtype without scales, or in eight bits."""
    if markov is None:
        return None, None
    return (markov.w2.codes, markov.w2.scales) if isinstance(markov.w2, Int8Weight) else (markov.w2, None)


def _rule_args(
    heads: DraftHeads,
    distribution: DraftDistribution | None,
    rows: SamplingBatch,
    keys: RoundKeys,
    candidates: Candidates | None,
) -> dict[str, Any]:
    """Return the arguments of the kernels that say how requests draw, and what competes with the drafter's tokens."""
    chains, weights = (None, None) if candidates is None else (candidates.chains, candidates.weights)
    vocabulary, seeded = heads.vocabulary, rows.any_seeded
    return {
        "token_ids_ptr": None if vocabulary is None else vocabulary.token_ids,
        "temperatures_ptr": None if rows.all_greedy else rows.draw_temperatures,
        "request_keys_ptr": keys.request_keys,
        "step_ptr": None if distribution is None else keys.device_step,
        "seed": keys.signed_seed,
        "seeds_ptr": rows.seeds if seeded else None,
        "positions_ptr": keys.positions,
        "is_seeded_ptr": rows.is_seeded.view(torch.uint8) if seeded else None,
        "chains_ptr": chains,
        "chains_stride": 0 if chains is None else chains.stride(0),
        "weights_ptr": weights,
        "weights_stride": 0 if weights is None else weights.stride(1),
        "columns_ptr": None if vocabulary is None or chains is None else vocabulary.columns,
        "REDUCED": vocabulary is not None,
        "SAMPLED": distribution is not None,
        "SEEDED": seeded,
        "CHAINED": chains is not None,
    }


def _check(base_logits: torch.Tensor, heads: DraftHeads) -> None:
    v, markov, vocabulary = base_logits.shape[-1], heads.markov, heads.vocabulary
    if not base_logits.is_contiguous():
        raise ValueError("base_logits must be contiguous; call .contiguous()")
    if vocabulary is not None and len(vocabulary.token_ids) != v:
        raise ValueError(
            f"base_logits has {v} columns, the draft vocabulary {len(vocabulary.token_ids)} tokens; take both from the "
            "same ProposalHeads"
        )
    if markov is None:
        return
    w2, scales = _codes_and_scales(markov)
    assert w2 is not None, "a Markov head has both matrices"
    if w2.shape != (v, markov.w1.shape[1]) or (scales is None and markov.w1.dtype != w2.dtype):
        raise ValueError(
            f"w2 is {tuple(w2.shape)} {w2.dtype} where the logits and w1 ask for "
            f"{(v, markov.w1.shape[1])} {markov.w1.dtype}; take both from the same checkpoint and cast them alike"
        )
    if not (markov.w1.is_contiguous() and w2.is_contiguous()):
        raise ValueError("w1 and w2 must be contiguous; call .contiguous() once when the drafter is loaded")
