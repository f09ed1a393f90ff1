"""Verification of whole blocks: judging the drafts and drawing the token after them; penalties and biases before."""

from __future__ import annotations

import math
from collections.abc import Iterator
from itertools import product

import torch
from dspark_kernels import (
    Adjustment,
    AdjustmentTable,
    DraftBlock,
    DraftDistribution,
    RoundKeys,
    SamplingBatch,
    Windows,
    accept,
    adjust,
)
from harness import Case, case

_GAMMA = 7
_EVERYTHING = Adjustment(0.1, 0.1, 1.1, 8, (0, 1), {2: 0.5})
# Of requests: top_k, top_p, seed. Filters are those of Qwen3's generation_config.
_RULES: dict[str, tuple[int, float, int | None]] = {
    "greedy": (-1, 1.0, None),
    "sampled": (-1, 1.0, None),
    "filtered": (20, 0.95, None),
    "nucleus": (-1, 0.95, None),
    "seeded": (-1, 1.0, 7),
    "seeded_filtered": (20, 0.95, 7),
}


def cases(device: torch.device) -> Iterator[Case]:
    """Yield batches of one rule, and of requests with all kinds of adjustments, over two vocabularies."""
    for rule, vocab_size, bs in product(_RULES, (49152, 151936), (1, 8, 64, 256)):
        yield _accepted(device, rule, bs, vocab_size)
    for vocab_size, bs in product((49152, 151936), (1, 8, 64)):
        yield _adjusted(device, bs, vocab_size)


def _accepted(device: torch.device, rule: str, bs: int, vocab_size: int) -> Case:
    """Return a batch of one rule, every block verified whole.

    The floor counts the logits once, and the row that is drawn from once more. A filter reads tiles of its rows again
    that can hold kept tokens (logits of a normal distribution: with top-k = 20 about 20 of 75, without top-k all of
    them), once to collect them and once more if it cuts a tie; a seed reads its rows once more. Rows that keep more
    than 2048 tokens near the cut are passed over some three times before: nucleus keeps thousands of these flat rows.
    """
    top_k, top_p, seed = _RULES[rule]
    drawn, sampled = rule != "greedy", rule != "greedy" and seed is None
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
    requests = torch.arange(bs, device=device)
    row = vocab_size * logits.element_size()
    return case(
        accept,
        {"bs": bs, "gamma": _GAMMA, "V": vocab_size},
        DraftBlock(drafts, distribution=distribution),
        Windows(
            torch.full((bs,), _GAMMA, dtype=torch.int64, device=device),
            torch.arange(0, num_rows + 1, _GAMMA + 1, device=device),
        ),
        logits,
        requests,
        SamplingBatch.from_lists(
            [float(drawn)] * bs, [top_k] * bs, [top_p] * bs, [0.0] * bs, [seed] * bs, device=device
        ),
        RoundKeys(1, torch.zeros((), dtype=torch.int64, device=device), requests, requests),
        # The row to draw from, and the distribution of the draft in its slot.
        bytes_moved=num_rows * row + (bs * (row + vocab_size * 4) if sampled else 0),
        name=f"accept_{rule}",
    )


def _adjusted(device: torch.device, bs: int, vocab_size: int) -> Case:
    width = _GAMMA + 1
    table = AdjustmentTable.empty(bs, vocab_size, device)
    for slot in range(bs):
        table.set(slot, _EVERYTHING, range(100))
    rows = torch.arange(bs * width, device=device)
    # Adjusted in place again and again: the values go astray, the time does not depend on them.
    logits = torch.randn(bs * width, vocab_size, device=device, dtype=torch.bfloat16)
    return case(
        adjust,
        {"bs": bs, "gamma": _GAMMA, "V": vocab_size},
        *(logits, table, torch.arange(bs, device=device), rows // width, rows % width),
        torch.randint(vocab_size, (bs * width,), device=device),
        torch.arange(0, bs * width + 1, width, device=device),
        # The rows there and back; counts, stops and biases of each request once.
        bytes_moved=2 * logits.nbytes + 9 * bs * vocab_size,
    )
