"""The walk of DFlash 2's selector: the whole block of a request in one launch, over the few tokens that compete.

Of a slot's base logits the best are kept, and the Markov head chooses among them. All others have probability 0, so the
distribution of the drafts is sparse and exact: verification divides by the very softmax that drew them.

Per slot, logits = U_k + W2 u in float32 for the few columns that compete, with u = (P h_k) * W1[x_{k-1}]; the choice
from them, its noise and its normaliser are those of ``walk_kernel``. The same logits say how likely the draft is
accepted, before anything is drawn. Scores of all other columns are minus infinity already.

Bytes of W2 that are read for a block: bs * gamma * k * r * sizeof(W2), where a walk over the vocabulary reads gamma * v
* r * sizeof(W2). For gamma = 7, k = 16, r = 256 in bfloat16 that is 57 kB a request in place of 545 MB a batch of v =
151,936. Base logits are read once, to rank them. A sampled block still writes 4 * gamma * v bytes of minus infinity per
request, for what verifies it reads rows of all columns.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
import triton
import triton.language as tl

from dspark_kernels.drafting.heads import Candidates, DraftBlock, DraftHeads
from dspark_kernels.drafting.layers import in_its_dtype
from dspark_kernels.drafting.walk_kernel import (
    DRAFT,
    FOLLOWED_AT,
    LOWEST_TEMPERATURE,
    NO_COLUMN,
    candidates_at,
    or_copied,
    seeded_race,
)
from dspark_kernels.noise import uniforms
from dspark_kernels.sampling import LOWEST

CERTAIN = 30.0
"""Largest confidence logit: a token that has no rival is not certain to be accepted."""


def competing_columns(
    base_logits: torch.Tensor,  # [bs, gamma, v]
    heads: DraftHeads,
    candidates: Candidates | None = None,
) -> torch.Tensor | None:
    """Return the columns that compete for each slot, best first; None if all do. No host sync.

    Returns:
        [bs, gamma, k] int64, or one more with candidates: that of the candidate of the text if it weighs anything,
        wherever it ranks; else the best one again.
    """
    if heads.shortlist is None:
        return None
    columns = base_logits.topk(min(heads.shortlist, base_logits.shape[-1])).indices
    if candidates is None:
        return columns
    _, nats, offered = candidates.offers(base_logits.shape[1], heads.vocabulary)
    competes = ((offered >= 0) & (nats > 0))[..., None]
    return torch.cat((columns, torch.where(competes, offered[..., None], columns[..., :1])), -1)


def log_odds(scores: torch.Tensor, competing: torch.Tensor, heads: DraftHeads) -> torch.Tensor:
    """Return [bs] float32 log odds of a slot's likeliest token from ``scores`` [bs, v] of its shortlist, temperature 1.

    Of a greedy request that is the draft. Of a sampled one it must not be: what decides whether a draft is verified may
    depend on the drafts before it, and not on the draft.
    """
    listed = competing[:, : min(heads.shortlist or 0, scores.shape[1])]
    ranked, _ = scores.gather(1, listed).float().sort(-1, descending=True)
    return (ranked[:, 0] - ranked[:, 1:].logsumexp(-1)).clamp(-CERTAIN, CERTAIN)


_CERTAIN = tl.constexpr(CERTAIN)
_MAX_BLOCK_R = 256
_SMALL_POINTERS = [
    *("anchors_ptr", "temperatures_ptr", "request_keys_ptr", "step_ptr", "seeds_ptr", "positions_ptr", "is_seeded_ptr"),
    *("log_norms_ptr", "tokens_ptr", "confidence_ptr", "chains_ptr", "weights_ptr", "least_ptr", "competing_ptr"),
]


def choose_listed(
    base_logits: torch.Tensor,  # [bs, gamma, v]
    hidden: torch.Tensor,  # [bs, gamma, d]
    anchors: torch.Tensor,  # [bs] int64
    heads: DraftHeads,
    competing: torch.Tensor,  # [bs, gamma, k or k + 1] int64
    rule: dict[str, Any],
    block: DraftBlock,
) -> torch.Tensor:
    """Write tokens of ``block``, and the distribution of sampled requests.

    Args:
        competing: as ``competing_columns`` returns them.
        rule: how requests draw, arguments of the kernel.

    Returns:
        [bs, gamma] float32 confidence logits, wanted or not: a kernel without them would be another form to compile.
    """
    markov = heads.markov
    assert markov is not None
    assert markov.projection is not None
    assert heads.shortlist is not None
    bs, gamma, v = base_logits.shape
    rank, members = markov.w2.shape[1], competing.shape[2]
    odds = torch.empty(block.tokens.shape, dtype=torch.float32, device=base_logits.device)
    choose_listed_kernel[(bs,)](
        base_ptr=base_logits,
        competing_ptr=competing,
        anchors_ptr=anchors,
        anchors_stride=anchors.stride(0),
        factors_ptr=F.linear(hidden, markov.projection).contiguous(),
        w1_ptr=markov.w1,
        w2_ptr=in_its_dtype(markov.w2),  # a few rows of it
        scores_ptr=None if block.distribution is None else block.distribution.scores,
        log_norms_ptr=None if block.distribution is None else block.distribution.log_norms,
        tokens_ptr=block.tokens,
        confidence_ptr=odds,
        least_ptr=None if rule["weights_ptr"] is None else rule["weights_ptr"][1],
        depth=gamma,
        v=v,
        TOP_K=min(heads.shortlist, v),
        MEMBERS=members,
        RANK=rank,
        BLOCK_K=triton.next_power_of_2(members),
        BLOCK_R=min(_MAX_BLOCK_R, triton.next_power_of_2(rank)),
        # Scores are summed as they are stored and drawn from: rounded to float32.
        enable_fp_fusion=False,
        **rule,
    )
    return odds


@triton.jit
def _bias_of(columns, competes, factors, embedding, w2_ptr, RANK: tl.constexpr, BLOCK_R: tl.constexpr) -> tl.tensor:
    """Return the product of W2's rows of some columns and a selector's latent, [BLOCK_K] float32.

    ``factors`` and ``embedding`` point to P h and to W1's row.
    """
    bias = tl.zeros([columns.shape[0]], tl.float32)
    for start in tl.static_range(0, RANK, BLOCK_R):
        dims = start + tl.arange(0, BLOCK_R)
        in_rank = dims < RANK
        factor = tl.load(factors + dims, mask=in_rank, other=0.0).to(tl.float32)
        latent = factor * tl.load(embedding + dims, mask=in_rank, other=0.0).to(tl.float32)
        rows = w2_ptr + columns.to(tl.int64)[:, None] * RANK + dims[None, :]
        w2 = tl.load(rows, mask=competes[:, None] & in_rank[None, :], other=0.0)
        # Rounded as in torch.
        bias += tl.sum(w2.to(tl.float32) * latent.to(w2.dtype).to(tl.float32)[None, :], 1)
    return bias


@triton.jit
def _log_odds(logits, members, TOP_K: tl.constexpr) -> tl.tensor:
    """Log odds of the likeliest of the shortlist from the logits [BLOCK_K] of members."""
    logits = tl.where(members < TOP_K, logits, float("-inf"))
    best = tl.max(logits, 0)
    others = tl.where(members == tl.argmax(logits, 0), 0.0, tl.exp(logits - best))
    return tl.minimum(tl.maximum(-tl.log(tl.sum(others, 0)), -_CERTAIN), _CERTAIN)


@triton.jit
def _competing(listed, members, TOP_K: tl.constexpr, MEMBERS: tl.constexpr):
    """Columns [BLOCK_K] of the members, and which compete: the last one may stand among those before it, too."""
    columns = tl.load(listed + members, mask=members < MEMBERS, other=-1).to(tl.int32)
    competes = members < TOP_K
    if MEMBERS > TOP_K:
        last = tl.sum(tl.where(members == TOP_K, columns, 0), 0)
        is_again = tl.sum(tl.where(competes & (columns == last), 1, 0), 0) > 0
        competes = competes | ((members == TOP_K) & (is_again == 0))
    return columns, competes


@triton.jit
def _column_at(number, weights, columns) -> tl.tensor:
    """Return the column, in their order, in which the cumulative weights [BLOCK_K] cross ``number`` times their sum.

    It is the last one of a positive weight before which there is at most so much; -1 if there is none.
    """
    weights = weights.to(tl.float64)
    before = tl.sum(tl.where(columns[None, :] < columns[:, None], weights[None, :], 0.0), 1)
    reached = (weights > 0) & (before <= number * tl.sum(weights, 0))
    return tl.max(tl.where(reached, columns, -1), 0)


# No depth, seed or stride may cause a compilation of its own, through its value or where its pointers lie.
@triton.jit(
    do_not_specialize=["depth", "anchors_stride", "seed", "chains_stride", "weights_stride"],
    do_not_specialize_on_alignment=_SMALL_POINTERS,
)
def choose_listed_kernel(
    base_ptr,  # [bs, depth, v]
    competing_ptr,  # [bs, depth, MEMBERS] int64 columns, of which the first TOP_K are the shortlist
    anchors_ptr,  # [bs] int64
    anchors_stride,
    factors_ptr,  # [bs, depth, RANK], P h
    w1_ptr,  # [V, RANK]
    w2_ptr,  # [v, RANK]
    token_ids_ptr,  # [v] int64, read when REDUCED
    temperatures_ptr,  # [bs] float32, 0 = greedy; read when SAMPLED or SEEDED
    request_keys_ptr,  # [bs] int64; this and the next two are read when SAMPLED
    step_ptr,  # [] int64
    seed: tl.int64,
    seeds_ptr,  # [bs] int64; this and the next two are read when SEEDED
    positions_ptr,  # [bs] int64, of slot 0
    is_seeded_ptr,  # [bs] uint8
    scores_ptr,  # [bs, depth, v] float32; written, as log_norms [bs, depth], for sampled requests when SAMPLED
    log_norms_ptr,
    tokens_ptr,  # [bs, depth] int64
    confidence_ptr,  # [bs, depth] float32
    chains_ptr,  # [bs, chains_stride] int64; this and the next two are read when CHAINED
    chains_stride,
    weights_ptr,  # [M + 1, weights_stride] float32, boosts
    least_ptr,  # [M + 1, weights_stride] float32, confidence logits
    weights_stride,
    columns_ptr,  # [V] int32, read when CHAINED and REDUCED
    depth,
    v,
    TOP_K: tl.constexpr,
    MEMBERS: tl.constexpr,
    RANK: tl.constexpr,
    REDUCED: tl.constexpr,
    SAMPLED: tl.constexpr,
    SEEDED: tl.constexpr,
    CHAINED: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_R: tl.constexpr,
) -> None:
    """Grid (requests,); see the module."""
    request = tl.program_id(0).to(tl.int64)
    members = tl.arange(0, BLOCK_K)
    previous = tl.load(anchors_ptr + request * anchors_stride)
    sharpness = tl.full([BLOCK_K], 1.0, tl.float32)
    if SAMPLED or SEEDED:
        # A copy for each member, as of what is compared below.
        temperatures = tl.load(temperatures_ptr + request + members * 0)
        is_sampled = temperatures > 0
        sharpness = 1.0 / tl.where(is_sampled, tl.maximum(temperatures, LOWEST_TEMPERATURE), 1.0)
    if SEEDED:
        is_seeded = tl.load(is_seeded_ptr + request + members * 0) != 0
        is_sampled = is_sampled & ~is_seeded
        own_seed, position = tl.load(seeds_ptr + request), tl.load(positions_ptr + request)
    if CHAINED:
        chain = chains_ptr + request * chains_stride
        followed = tl.load(chain + FOLLOWED_AT)

    for row in range(request * depth, (request + 1) * depth):
        slot = row - request * depth
        columns, competes = _competing(competing_ptr + row * MEMBERS, members, TOP_K, MEMBERS)
        logits = tl.load(base_ptr + row * v + columns, mask=competes, other=0.0).to(tl.float32)
        logits += _bias_of(columns, competes, factors_ptr + row * RANK, w1_ptr + previous * RANK, w2_ptr, RANK, BLOCK_R)
        # A NaN never wins, so that the choice is a column even if all of them are.
        logits = tl.where((logits == logits) & competes, logits, float("-inf"))
        scores = logits * sharpness
        if CHAINED:
            alive = followed == slot
            candidate, candidate_column, boost = candidates_at(
                chain, weights_ptr, weights_stride, columns_ptr, slot, True, alive, REDUCED
            )
            scores += tl.where(columns == candidate_column, boost, 0.0)
        odds = _log_odds(logits, members, TOP_K)
        if CHAINED:
            least = tl.load(least_ptr + tl.load(chain) * weights_stride + slot, mask=alive, other=float("-inf"))
            odds = tl.maximum(odds, least)
        tl.store(confidence_ptr + row, odds)
        values = scores
        if SAMPLED:
            tl.store(scores_ptr + row * v + columns, scores, mask=competes & is_sampled)
            top = tl.maximum(tl.max(scores, 0), LOWEST)
            log_norm = top + tl.log(tl.sum(tl.exp(scores - top), 0))
            tl.store(log_norms_ptr + row + members * 0, log_norm, mask=is_sampled & (members == 0))
            number = uniforms(seed, tl.load(step_ptr), tl.load(request_keys_ptr + request), slot, DRAFT)
            drawn = _column_at(number, tl.exp(scores - top), columns)
        if SEEDED:
            raced = seeded_race(scores, own_seed, position + slot, token_ids_ptr, columns, competes, REDUCED)
            values = tl.where(is_seeded, raced, values)
        chosen = tl.min(tl.where(competes & (values == tl.max(values, 0)), columns, NO_COLUMN), 0)
        if SAMPLED:
            chosen = tl.where((tl.max(is_sampled.to(tl.int32), 0) > 0) & (drawn >= 0), drawn, chosen)
        previous = chosen.to(tl.int64)
        if REDUCED:
            previous = tl.load(token_ids_ptr + previous)
        if CHAINED:
            previous = or_copied(previous, candidate, candidate_column, boost, alive)
            followed = tl.where(alive & (previous == candidate), slot + 1, followed)
            tl.store(chain + FOLLOWED_AT, followed)
        tl.store(tokens_ptr + row, previous)
