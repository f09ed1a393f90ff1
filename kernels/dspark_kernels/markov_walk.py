"""The kernels' walk through a draft block, and what it computes in plain torch.

Per slot: logits = U_k + W2 u in float32, with u = W1[x_{k-1}] or what the head makes of it; x_k = argmax(logits) for a
greedy request, argmax(logits / T - log E_k) for a sampled or seeded one, with the engine's noise or that of its own
seed. The law is softmax(logits / T): temperature alone, no top-k, top-p or min-p. Verification is exact for every law
that the drafts were really drawn from, so the price is some acceptance where the target's filters are narrow.

What one block must move: W2 and the base logits once per slot, gamma * v * (r * sizeof(W2) + bs * sizeof(U)) bytes,
plus gamma * bs * v * 4 for the scores of sampled requests. W2 of 151,936 tokens and rank 256 in bfloat16 is 78 MB, more
than the 50 MB of L2 of an H200: 0.54 GB for gamma = 7, or 0.11 ms at 4.8 TB/s before the first request is counted.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any, Protocol

import torch
import triton

from .block_confidence import ConfidenceWeights, block_confidence, block_confidence_ref
from .draft_block import DraftBlock, DraftVocabulary
from .draft_law import DraftLaw
from .markov_sample_kernel import choose_kernel
from .noise import Purpose, RoundKeys, exponential_at

_MIN_DOT = 16  # smallest tile side of tl.dot
_MAX_BLOCK_B = 64  # requests that share one reading of a W2 tile; registers and shared memory end here
_BLOCK_V = 64
_BLOCK_R = {torch.float32: 32}  # products in full float32 keep their operands in registers
_MAX_BLOCK_R = 256
_FINISH_TILE = 2048  # partial results that the last program of a group takes at a time
_STAGES_BYTES = 147_456  # of shared memory that three stages of the largest tiles take
_INTERPRETED_PROGRAMS = 3  # enough to see tiles shared out unevenly


class LatentHead(Protocol):
    """A sequential head whose latent u is more than the last token's embedding (gated, rnn)."""

    def initial_state(self, bs: int, device: torch.device, dtype: torch.dtype) -> torch.Tensor | None: ...

    def latent(
        self,
        w1_embedding: torch.Tensor,  # [bs, r]
        hidden: torch.Tensor,  # [bs, d]
        state: torch.Tensor | None,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:  # u [bs, r], next state
        ...


@dataclass(frozen=True)
class MarkovWeights:
    """A Markov head's tensors.

    Attributes:
        w1: [V, r], contiguous.
        w2: [v, r] of the same dtype, contiguous; a row per column of the draft logits.
        head: forms the latent; None where that is the embedding itself (vanilla).
    """

    w1: torch.Tensor
    w2: torch.Tensor
    head: LatentHead | None


@dataclass(frozen=True)
class WalkWeights:
    """The heads that the walk reads, each None where the drafter has none."""

    markov: MarkovWeights | None
    confidence: ConfidenceWeights | None


def markov_walk_ref(
    base_logits: torch.Tensor,  # [bs, gamma, v]
    hidden: torch.Tensor,  # [bs, gamma, d]
    anchors: torch.Tensor,  # [bs] int64
    weights: WalkWeights,
    temperatures: torch.Tensor | None,  # [bs] float32
    keys: RoundKeys,
    vocabulary: DraftVocabulary | None = None,
    *,
    seeds: tuple[torch.Tensor, torch.Tensor] | None = None,  # [bs] int64, [bs] bool
    any_sampled: bool = True,
    with_confidence: bool = True,
) -> DraftBlock:
    """The same as :func:`markov_walk` in plain torch: same noise, hence the same tokens up to rounding."""
    slots: list[torch.Tensor] = []
    scores: list[torch.Tensor] = []
    previous, latent_of = anchors, _latents(weights.markov, hidden)
    for k in range(base_logits.shape[1]):
        values = base_logits[:, k].float()
        if weights.markov is not None:
            values = values + latent_of(previous, k).float() @ weights.markov.w2.float().T
        if temperatures is not None:
            is_drawn = temperatures[:, None] > 0
            scores.append(values / temperatures[:, None].masked_fill(~is_drawn, 1.0))
            noise = keys.race(k, Purpose.DRAFT, values.shape[-1])
            if seeds is not None:
                own_noise = _own_noise(seeds[0], keys.positions + k, values.shape[-1], vocabulary)
                noise = torch.where(seeds[1][:, None], own_noise, noise)
            values = torch.where(is_drawn, scores[-1] - noise.log(), values.double())
        columns = values.argmax(-1)
        previous = columns if vocabulary is None else vocabulary.token_ids[columns]
        slots.append(previous)
    tokens = torch.stack(slots, dim=1)
    law = None
    if scores and any_sampled:
        stacked = torch.stack(scores, dim=1)
        law = DraftLaw(stacked, stacked.logsumexp(-1), None if vocabulary is None else vocabulary.columns)
    confidence_logits = None
    if weights.confidence is not None and with_confidence:
        w1 = None if weights.markov is None else weights.markov.w1
        confidence_logits = block_confidence_ref(hidden, anchors, tokens, weights.confidence, w1)
    return DraftBlock(tokens, None, confidence_logits, law)


def markov_walk(
    base_logits: torch.Tensor,  # [bs, gamma, v]
    hidden: torch.Tensor,  # [bs, gamma, d]
    anchors: torch.Tensor,  # [bs] int64
    weights: WalkWeights,
    temperatures: torch.Tensor | None,  # [bs] float32
    keys: RoundKeys,
    vocabulary: DraftVocabulary | None = None,
    *,
    seeds: tuple[torch.Tensor, torch.Tensor] | None = None,  # [bs] int64, [bs] bool
    any_sampled: bool = True,
    with_confidence: bool = True,
) -> DraftBlock:
    """Draft a block token by token.

    One launch per slot, one to clear counters and one for the confidence logits; a gated or rnn head adds its own
    torch operations to every slot.

    Args:
        base_logits: float32, float16 or bfloat16; the last dimension contiguous.
        hidden: post-norm hidden states, read by gated and rnn heads and by the confidence head.
        anchors: the last committed token of each request.
        weights: the heads.
        temperatures: 0 for a greedy request, otherwise the divisor of its logits; None when all are greedy, which
            spares the noise, the scores and the normalisers.
        keys: noise keys of this round. ``request_keys`` must lie in [0, 2**32). Under graph capture ``step`` must be a
            tensor, and the seed becomes a constant of the graph. Not read when all requests are greedy.
        vocabulary: the tokens that the columns stand for; None = all. The engine's noise is keyed by column, that of a
            seed by token.
        seeds: the requests' own seeds, and which requests draw with them, at positions ``keys.positions`` + slot; these
            have a temperature. None when none does.
        any_sampled: whether any request that has a temperature draws with the engine's noise.
        with_confidence: whether to compute confidence logits, where the drafter has that head.

    Returns:
        The block, with ``law`` where a request is sampled. Greedy ties go to the lowest column; NaN logits never
        win, and a row of nothing but NaN or -inf gives its first column. No host sync; safe under graph capture.

    Raises:
        ValueError: heads or logits do not fit together, or are not contiguous.
    """
    bs, gamma, v = base_logits.shape
    markov = weights.markov
    _check(base_logits, markov, vocabulary)
    device = base_logits.device
    block_b = min(_MAX_BLOCK_B, max(_MIN_DOT, triton.next_power_of_2(bs)))
    groups = triton.cdiv(bs, block_b)
    programs = min(triton.cdiv(v, _BLOCK_V), max(1, _num_residents(device, _num_warps(block_b)) // groups))
    counters = torch.zeros((gamma, groups), dtype=torch.int32, device=device)
    partials = torch.empty((3, groups, programs, block_b), dtype=torch.float32, device=device)
    partial_columns = torch.empty((groups, programs, block_b), dtype=torch.int32, device=device)

    tokens = torch.empty((bs, gamma), dtype=torch.int64, device=device)
    law, step = None, None
    if temperatures is not None and any_sampled:
        law, step = _empty_law(base_logits, vocabulary), keys.device_step
    own_seeds, is_seeded = seeds or (None, None)
    by_token = markov is not None and markov.head is None
    latent_of = _latents(markov, hidden)
    max_block_r = _MAX_BLOCK_R if markov is None else _BLOCK_R.get(markov.w2.dtype, _MAX_BLOCK_R)
    rank = 0 if markov is None else markov.w2.shape[1]
    for k in range(gamma):
        slot_logits, previous = base_logits[:, k], anchors if k == 0 else tokens[:, k - 1]
        latents = None
        if markov is not None:
            latents = markov.w1 if by_token else latent_of(previous, k).to(markov.w2.dtype).contiguous()
        choose_kernel[(groups, programs)](
            slot_logits,
            slot_logits.stride(0),
            previous,
            previous.stride(0),
            latents,
            None if markov is None else markov.w2,
            None if vocabulary is None else vocabulary.token_ids,
            temperatures,
            keys.request_keys,
            step,
            keys.signed_seed,
            own_seeds,
            keys.positions,
            None if is_seeded is None else is_seeded.view(torch.uint8),
            None if law is None else law.scores[:, k],
            gamma * v,
            None if law is None else law.log_norms[:, k],
            gamma,
            tokens[:, k],
            gamma,
            partials,
            partial_columns,
            counters[k],
            k,
            bs,
            v,
            RANK=rank,
            BY_TOKEN=by_token,
            REDUCED=vocabulary is not None,
            SAMPLED=law is not None,
            SEEDED=seeds is not None,
            BLOCK_B=block_b,
            BLOCK_V=_BLOCK_V,
            BLOCK_R=min(max_block_r, max(_MIN_DOT, triton.next_power_of_2(rank))),
            BLOCK_P=max(1, _FINISH_TILE // block_b),
            num_warps=_num_warps(block_b),
            num_stages=3 if shared_bytes(device) >= _STAGES_BYTES else 2,
        )
    confidence_logits = None
    if weights.confidence is not None and with_confidence:
        w1 = None if markov is None else markov.w1
        confidence_logits = block_confidence(hidden, anchors, tokens, weights.confidence, w1)
    return DraftBlock(tokens, None, confidence_logits, law)


def _own_noise(
    seeds: torch.Tensor,  # [bs] int64
    positions: torch.Tensor,  # [bs] int64
    v: int,
    vocabulary: DraftVocabulary | None,
) -> torch.Tensor:
    """[bs, v] float64 noise of the requests' own seeds at the tokens of the columns."""
    tokens = torch.arange(v, device=seeds.device) if vocabulary is None else vocabulary.token_ids
    return exponential_at(seeds[:, None], positions[:, None], tokens)


def _latents(markov: MarkovWeights | None, hidden: torch.Tensor) -> Callable[[torch.Tensor, int], torch.Tensor]:
    """A function that gives u [bs, r] of a slot from the tokens [bs] before it; to be called slot by slot."""
    state: torch.Tensor | None = None
    if markov is not None and markov.head is not None:
        state = markov.head.initial_state(hidden.shape[0], hidden.device, hidden.dtype)

    def latent_of(previous: torch.Tensor, slot: int) -> torch.Tensor:
        nonlocal state
        assert markov is not None, "without a Markov head there is no latent"
        embedding = markov.w1[previous]
        if markov.head is None:
            return embedding
        latent, state = markov.head.latent(embedding, hidden[:, slot], state)
        return latent

    return latent_of


def _empty_law(base_logits: torch.Tensor, vocabulary: DraftVocabulary | None) -> DraftLaw:
    scores = torch.empty(base_logits.shape, dtype=torch.float32, device=base_logits.device)
    log_norms = torch.empty(base_logits.shape[:2], dtype=torch.float32, device=base_logits.device)
    return DraftLaw(scores, log_norms, None if vocabulary is None else vocabulary.columns)


def _num_warps(block_b: int) -> int:
    return 8 if block_b == _MAX_BLOCK_B else 4


@cache
def shared_bytes(device: torch.device) -> int:
    """Shared memory that a program can have: 99 KB on an L4 or an RTX 4090, more than twice that on an H100."""
    if device.type != "cuda":
        return _STAGES_BYTES
    properties: Any = torch.cuda.get_device_properties(device)  # the stub lacks the attribute
    return int(properties.shared_memory_per_block_optin)


@cache
def _num_residents(device: torch.device, num_warps: int) -> int:
    """How many programs run at the same time. Each has its share of the vocabulary, so more would only wait.

    In bfloat16 with rank 256, registers and shared memory of sm_90 hold two of 4 warps and one of 8, and so do those of
    sm_89 in two stages.
    """
    if device.type != "cuda":
        return _INTERPRETED_PROGRAMS
    return torch.cuda.get_device_properties(device).multi_processor_count * (8 // num_warps)


def _check(base_logits: torch.Tensor, markov: MarkovWeights | None, vocabulary: DraftVocabulary | None) -> None:
    v = base_logits.shape[-1]
    if base_logits.stride(-1) != 1:
        raise ValueError("base_logits must be contiguous in its last dimension; call .contiguous()")
    if vocabulary is not None and len(vocabulary.token_ids) != v:
        raise ValueError(
            f"base_logits has {v} columns, the draft vocabulary {len(vocabulary.token_ids)} tokens; take both from the "
            "same ProposalHeads"
        )
    if markov is None:
        return
    if markov.w2.shape != (v, markov.w1.shape[1]) or markov.w1.dtype != markov.w2.dtype:
        raise ValueError(
            f"w2 is {tuple(markov.w2.shape)} {markov.w2.dtype} where the logits and w1 ask for "
            f"{(v, markov.w1.shape[1])} {markov.w1.dtype}; take both from the same checkpoint and cast them alike"
        )
    if not (markov.w1.is_contiguous() and markov.w2.is_contiguous()):
        raise ValueError("w1 and w2 must be contiguous; call .contiguous() once when the drafter is loaded")
