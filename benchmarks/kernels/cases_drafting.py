"""The walk through a draft block, confidences, candidates of prompt lookup, and parts of the draft layers; bfloat16."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import product

import torch
from cases import Case, case
from dspark_kernels import (
    MOST_MATCH,
    NUM_ROWS,
    Candidates,
    ConfidenceWeights,
    DraftHeads,
    DraftVocabulary,
    Int8Weight,
    MarkovWeights,
    RoundKeys,
    SamplingBatch,
    StepRequests,
    add_norm,
    block_confidence,
    block_convolution,
    block_survival,
    draft_block,
    int8_linear,
    silu_mul,
    suffix_match,
)

_GAMMA, _RANK, _VOCAB = 7, 256, 151_936
_HIDDEN, _INTERMEDIATE = 2560, 9728  # of a Qwen3-4B drafter
_KV, _LISTED = 2048, 32_768  # rows of its K/V projections, and of the LM head of a list of tokens
_BATCH_SIZES = (1, 8, 64, 256)
_DTYPE = torch.bfloat16


def cases(device: torch.device) -> Iterator[Case]:
    """Yield every batch size; walks of greedy, sampled and seeded requests, and contexts that are short and long."""
    for v in (49152, _VOCAB):
        heads = _heads(v, device)
        for sampled, bs in product((False, True), _BATCH_SIZES):
            yield _walk(bs, v, heads, sampled)
            yield _walk(bs, v, _selector(heads, device), sampled)
    for bs in (1, 64):
        yield _walk(bs, _LISTED, _heads(_LISTED, device, eight_bits=True), True)
    for seeded in (1, 64):
        yield _walk(64, _VOCAB, heads, True, seeded)
        vocabulary = DraftVocabulary(torch.arange(_VOCAB, device=device), _VOCAB)
        yield _walk(64, _VOCAB, replace(_selector(heads, device), vocabulary=vocabulary), True, seeded)
    for width, bs in product((576, _HIDDEN), _BATCH_SIZES):
        yield _confidence(bs, width, device)
    for bs in _BATCH_SIZES:
        logits = torch.randn(bs, _GAMMA, device=device)
        yield case(block_survival, torch.ones(2, _GAMMA, device=device), logits, bs)
    for context, bs in product((2048, 32_768), (1, 8, 64)):
        yield _suffix_match(bs, context, device)
    for bs in _BATCH_SIZES:
        yield from _layer(bs * _GAMMA, device)
    for out, num_rows in product((_KV, 2 * _INTERMEDIATE, _LISTED), (7, 56, 112)):
        rows = torch.randn(num_rows, _HIDDEN, device=device).to(_DTYPE)
        yield case(int8_linear, rows, _in_eight_bits(out, _HIDDEN, device), name=f"int8_linear_{out}_{num_rows}")


def _in_eight_bits(out: int, size: int, device: torch.device) -> Int8Weight:
    codes = torch.randint(-127, 128, (out, size), device=device, dtype=torch.int8)
    return Int8Weight(codes, torch.rand(out, device=device), torch.randn(out, size, device=device, dtype=_DTYPE))


def _heads(v: int, device: torch.device, *, eight_bits: bool = False) -> DraftHeads:
    w1, w2 = (torch.randn(v, _RANK, device=device, dtype=_DTYPE) for _ in range(2))
    projection, bias = torch.randn(2048 + _RANK, device=device), torch.zeros(1, device=device)
    stored = _in_eight_bits(v, _RANK, device) if eight_bits else w2
    return DraftHeads(MarkovWeights(w1, stored, None), ConfidenceWeights(projection, bias))


def _selector(heads: DraftHeads, device: torch.device) -> DraftHeads:
    """Return a selector with the tables of a vanilla head."""
    assert heads.markov is not None
    projection = torch.randn(_RANK, 2048, device=device, dtype=_DTYPE)
    return DraftHeads(replace(heads.markov, projection=projection), shortlist=16)


def _walk(bs: int, v: int, heads: DraftHeads, sampled: bool, seeded: int = 0) -> Case:
    """Return a walk through a Markov head and what says how sure it is, with candidates."""
    device = heads.markov.w1.device if heads.markov else None
    base_logits = torch.randn(bs, _GAMMA, v, device=device, dtype=_DTYPE)
    hidden = torch.randn(bs, _GAMMA, 2048, device=device, dtype=_DTYPE)
    anchors = torch.arange(bs, device=device)
    seeds = [7] * seeded + [None] * (bs - seeded)
    rows = SamplingBatch.from_lists([float(sampled)] * bs, [-1] * bs, [1.0] * bs, [0.0] * bs, seeds, anchors.device)
    keys = RoundKeys(1, torch.zeros((), dtype=torch.int64, device=device), anchors, anchors)
    chains = torch.randint(v, (bs, 2 + _GAMMA + 1), device=device)
    chains[:, 0], chains[:, 1] = MOST_MATCH, 0
    candidates = Candidates(chains, torch.ones(2, NUM_ROWS, _GAMMA, device=device))
    form = ("sampled" if seeded < bs else "seeded") if sampled else "greedy"
    stored = "_int8" if heads.markov and isinstance(heads.markov.w2, Int8Weight) else ""
    name = f"{'markov' if heads.shortlist is None else 'selector'}_sample{stored}_{form}"
    return case(draft_block, base_logits, hidden, anchors, heads, rows, keys, candidates, name=name)


def _confidence(bs: int, width: int, device: torch.device) -> Case:
    return case(
        block_confidence,
        torch.randn(bs, _GAMMA, width, device=device, dtype=_DTYPE),
        torch.randint(_VOCAB, (bs,), device=device),
        torch.randint(_VOCAB, (bs, _GAMMA), device=device),
        ConfidenceWeights(torch.randn(width + _RANK, device=device), torch.zeros(1, device=device)),
        torch.randn(_VOCAB, _RANK, device=device, dtype=_DTYPE),
    )


def _suffix_match(bs: int, context: int, device: torch.device) -> Case:
    requests = StepRequests(
        anchors=torch.randint(150_000, (bs,), device=device),
        prefix_lens=torch.full((bs,), context - 1, device=device),
        req_pool_indices=torch.arange(bs, device=device),
        req_to_token=torch.arange(bs * context, device=device, dtype=torch.int32).view(bs, context),
    )
    return case(suffix_match, requests, torch.randint(150_000, (bs * context,), device=device), _GAMMA + 1)


def _layer(num_rows: int, device: torch.device) -> Iterator[Case]:
    """Yield the activation of SwiGLU, a residual with the norm after it, and a convolution along blocks."""
    yield case(silu_mul, torch.randn(num_rows, 2 * _INTERMEDIATE, device=device).to(_DTYPE))
    hidden, update = (torch.randn(num_rows, _HIDDEN, device=device).to(_DTYPE) for _ in range(2))
    yield case(add_norm, hidden, update, torch.ones(_HIDDEN, dtype=_DTYPE, device=device), 1e-6)
    base, kernels = torch.ones(2, _HIDDEN, dtype=_DTYPE, device=device), torch.zeros(num_rows, 4 * _HIDDEN // 16)
    dynamic = kernels.to(device, _DTYPE).unflatten(-1, (2, 2, -1)).unbind(1)[1]
    yield case(block_convolution, hidden, base, dynamic, _GAMMA)
