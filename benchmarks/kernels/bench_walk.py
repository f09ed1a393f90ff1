"""The walk through a draft block: vanilla Markov head of rank 256, confidence head, candidates, 7 slots, bfloat16.

The reference is the torch walk that serves without kernels. W2 counts once per slot: the next slot cannot begin before
this one has its token, and a real vocabulary's W2 does not stay in L2 (that of 49152 tokens might).
"""

from __future__ import annotations

from functools import partial

import torch
from dspark_kernels import (
    MOST_MATCH,
    NUM_ROWS,
    Candidates,
    ConfidenceWeights,
    DraftHeads,
    MarkovWeights,
    RoundKeys,
    SamplingBatch,
    draft_block,
    draft_block_ref,
)
from harness import Case

GAMMA, RANK, HIDDEN = 7, 256, 2048
BATCH_SIZES = (1, 8, 64, 256)
VOCABULARIES = (49152, 151936)
_DTYPE = torch.bfloat16


def _heads(v: int, device: torch.device) -> DraftHeads:
    w1, w2 = (torch.randn(v, RANK, device=device, dtype=_DTYPE) for _ in range(2))
    projection, bias = torch.randn(HIDDEN + RANK, device=device), torch.zeros(1, device=device)
    return DraftHeads(MarkovWeights(w1, w2, None), ConfidenceWeights(projection, bias))


def _case(bs: int, v: int, heads: DraftHeads, sampled: bool, seeded: int = 0) -> Case:
    assert heads.markov is not None
    w2 = heads.markov.w2
    device = w2.device
    base_logits = torch.randn(bs, GAMMA, v, device=device, dtype=_DTYPE)
    hidden = torch.randn(bs, GAMMA, HIDDEN, device=device, dtype=_DTYPE)
    anchors = torch.arange(bs, device=device)
    seeds = [7] * seeded + [None] * (bs - seeded)
    rows = SamplingBatch.from_lists([float(sampled)] * bs, [-1] * bs, [1.0] * bs, [0.0] * bs, seeds, device)
    keys = RoundKeys(1, torch.zeros((), dtype=torch.int64, device=device), anchors, anchors)
    chains = torch.randint(v, (bs, 2 + GAMMA + 1), device=device)
    chains[:, 0], chains[:, 1] = MOST_MATCH, 0
    candidates = Candidates(chains, torch.ones(2, NUM_ROWS, GAMMA, device=device))
    arguments = (base_logits, hidden, anchors, heads, rows, keys, candidates)
    logits = bs * GAMMA * v
    num_bytes = GAMMA * w2.nbytes + base_logits.nbytes + hidden.nbytes + 4 * GAMMA * v * (bs - seeded) * sampled
    return Case(
        name="markov_sample_" + (("sampled" if seeded < bs else "seeded") if sampled else "greedy"),
        shape={"bs": bs, "gamma": GAMMA, "V": v, "r": RANK} | ({"seeded": seeded} if seeded else {}),
        run=partial(draft_block, *arguments),
        reference=partial(draft_block_ref, *arguments),
        bytes_moved=num_bytes,
        flops=2 * logits * RANK,
    )


def cases(device: torch.device) -> list[Case]:
    """Every batch size and vocabulary, all requests greedy and all sampled; some with seeds of their own."""
    heads = {v: _heads(v, device) for v in VOCABULARIES}
    sizes = [(bs, v, heads[v]) for v in VOCABULARIES for bs in BATCH_SIZES]
    return [
        *(_case(*size, sampled) for sampled in (False, True) for size in sizes),
        *(_case(*sizes[-2], True, seeded) for seeded in (1, 64)),
    ]
