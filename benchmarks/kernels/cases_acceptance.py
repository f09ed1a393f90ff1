"""Verification of whole blocks: judging the drafts and drawing the token after them, or simulating that; penalties."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product

import torch
from cases import Case, case
from dspark_kernels import (
    QUANTILES,
    Adjustment,
    AdjustmentTable,
    DraftBlock,
    DraftDistribution,
    RoundKeys,
    SamplingBatch,
    SimulatedDraws,
    Windows,
    accept,
    adjust,
    simulated_accept,
    simulated_confidence,
)

_GAMMA = 7
_EVERYTHING = Adjustment(0.1, 0.1, 1.1, 8, (0, 1), {2: 0.5})
# Of requests: top_k, top_p, seed.
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
    for bs, whole in product((1, 64), (True, False)):
        yield from _simulated(device, bs, whole=whole)


def _accepted(device: torch.device, rule: str, bs: int, vocab_size: int) -> Case:
    """Return a batch of one rule, every block verified whole."""
    top_k, top_p, seed = _RULES[rule]
    drawn, num_rows = rule != "greedy", bs * (_GAMMA + 1)
    distribution = None
    if drawn and seed is None:
        scores = torch.randn(bs, _GAMMA, vocab_size, device=device)
        distribution = DraftDistribution(scores, scores.logsumexp(-1))
    requests = torch.arange(bs, device=device)
    return case(
        accept,
        DraftBlock(torch.randint(vocab_size, (bs, _GAMMA), device=device), distribution=distribution),
        Windows(
            torch.full((bs,), _GAMMA, dtype=torch.int64, device=device),
            torch.arange(0, num_rows + 1, _GAMMA + 1, device=device),
        ),
        torch.randn(num_rows, vocab_size, device=device, dtype=torch.bfloat16),
        requests,
        SamplingBatch.from_lists(
            [float(drawn)] * bs, [top_k] * bs, [top_p] * bs, [0.0] * bs, [seed] * bs, device=device
        ),
        RoundKeys(1, torch.zeros((), dtype=torch.int64, device=device), requests, requests),
        name=f"accept_{rule}",
    )


def _adjusted(device: torch.device, bs: int, vocab_size: int) -> Case:
    width = _GAMMA + 1
    table = AdjustmentTable.empty(bs, vocab_size, device)
    for slot in range(bs):
        table.set(slot, _EVERYTHING, range(100))
    rows = torch.arange(bs * width, device=device)
    return case(
        adjust,
        torch.randn(bs * width, vocab_size, device=device, dtype=torch.bfloat16),
        *(table, torch.arange(bs, device=device), rows // width, rows % width),
        torch.randint(vocab_size, (bs * width,), device=device),
        torch.arange(0, bs * width + 1, width, device=device),
    )


def _simulated(device: torch.device, bs: int, *, whole: bool) -> Iterator[Case]:
    rows = torch.arange(bs, device=device)
    draws = SimulatedDraws(rows, torch.full((_GAMMA, QUANTILES), 0.8, device=device))
    drafts, lens = torch.zeros((bs, _GAMMA), dtype=torch.int64, device=device), None if whole else rows
    yield case(simulated_accept, draws, rows, rows, drafts, rows, lens)
    yield case(simulated_confidence, draws, rows, rows, _GAMMA)
