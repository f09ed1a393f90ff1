"""Verification of whole blocks: judging the drafts and drawing the token after them."""

from __future__ import annotations

import math
from functools import partial

import torch
from dspark_kernels import DraftBlock, DraftDistribution, RoundKeys, SamplingBatch, Windows, accept, accept_ref
from harness import Case

_GAMMA = 7


# Of requests: top_k, top_p, seed. Filters are those of Qwen3's generation_config.
_RULES: dict[str, tuple[int, float, int | None]] = {
    "greedy": (-1, 1.0, None),
    "sampled": (-1, 1.0, None),
    "filtered": (20, 0.95, None),
    "nucleus": (-1, 0.95, None),
    "seeded": (-1, 1.0, 7),
    "seeded_filtered": (20, 0.95, 7),
}


def cases(device: torch.device) -> list[Case]:
    """Batches of one rule, of 1 to 256 requests over two vocabularies, every block verified whole.

    The floor counts the logits once, and the row that is drawn from once more. A filter reads tiles of its rows again
    that can hold kept tokens (logits of a normal distribution: with top-k = 20 about 20 of 75, without top-k all of
    them), once to collect them and once more where it cuts a tie; a seed reads its rows once more. Rows that keep more
    than 2048 tokens near the cut are passed over some three times before: nucleus keeps thousands of these flat rows.
    """
    return [
        _case(device, rule, bs, vocab_size)
        for rule in _RULES
        for vocab_size in (49152, 151936)
        for bs in (1, 8, 64, 256)
    ]


def _case(device: torch.device, rule: str, bs: int, vocab_size: int) -> Case:
    top_k, top_p, seed = _RULES[rule]
    drawn, sampled = rule != "greedy", rule != "greedy" and seed is None
    torch.manual_seed(0)
    num_rows = bs * (_GAMMA + 1)
    drafts = torch.randint(vocab_size, (bs, _GAMMA), device=device)
    logits = torch.randn(num_rows, vocab_size, device=device, dtype=torch.bfloat16)
    # The others, of mean weight exp(1/2), make half of p_t; the draft is surer of itself: half of its tokens are kept.
    half = math.log(vocab_size) + 0.5
    logits.view(bs, _GAMMA + 1, vocab_size)[:, :_GAMMA].scatter_(2, drafts[..., None], half if drawn else 6.0)
    distribution = None
    if sampled:
        scores = torch.randn(bs, _GAMMA, vocab_size, device=device)
        scores.scatter_(2, drafts[..., None], half + 3.0)
        distribution = DraftDistribution(scores, scores.logsumexp(-1))
    verify_lens = torch.full((bs,), _GAMMA, dtype=torch.int64, device=device)
    indptr = torch.arange(0, num_rows + 1, _GAMMA + 1, device=device)
    rows = SamplingBatch.from_lists(
        [float(drawn)] * bs, [top_k] * bs, [top_p] * bs, [0.0] * bs, [seed] * bs, device=device
    )
    requests = torch.arange(bs, device=device)
    keys = RoundKeys(1, torch.zeros((), dtype=torch.int64, device=device), requests, requests)

    arguments = (
        DraftBlock(drafts, distribution=distribution),
        Windows(verify_lens, indptr),
        logits,
        requests,
        rows,
        keys,
    )
    row = vocab_size * logits.element_size()
    # The row to draw from, and the distribution of the draft in its slot.
    redrawn = bs * (row + vocab_size * 4) if sampled else 0
    return Case(
        name=f"accept_{rule}",
        shape={"bs": bs, "gamma": _GAMMA, "V": vocab_size},
        run=partial(accept, *arguments),
        reference=partial(accept_ref, *arguments),
        bytes_moved=num_rows * row + redrawn,
        flops=0,
    )
