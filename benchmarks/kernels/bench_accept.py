"""Verification of whole blocks: judging the drafts and drawing the token after them."""

from __future__ import annotations

import math

import torch
from dspark_kernels.accept import accept_ref
from dspark_kernels.accept_fused import accept
from dspark_kernels.draft_law import DraftLaw
from dspark_kernels.noise import RoundKeys
from dspark_kernels.sampling_params import SamplingRows
from harness import Case

_GAMMA = 7


def cases(device: torch.device) -> list[Case]:
    """Greedy and sampled batches of 1 to 256 requests over two vocabularies, every block verified whole."""
    return [
        _case(device, sampled, bs, vocab_size)
        for sampled in (False, True)
        for vocab_size in (49152, 151936)
        for bs in (1, 8, 64, 256)
    ]


def _case(device: torch.device, sampled: bool, bs: int, vocab_size: int) -> Case:
    torch.manual_seed(0)
    num_rows = bs * (_GAMMA + 1)
    drafts = torch.randint(vocab_size, (bs, _GAMMA), device=device)
    logits = torch.randn(num_rows, vocab_size, device=device, dtype=torch.bfloat16)
    # The others, of mean weight exp(1/2), make half of p_t; the draft is surer of itself: half of its tokens are kept.
    half = math.log(vocab_size) + 0.5
    logits.view(bs, _GAMMA + 1, vocab_size)[:, :_GAMMA].scatter_(2, drafts[..., None], half if sampled else 6.0)
    law = None
    if sampled:
        scores = torch.randn(bs, _GAMMA, vocab_size, device=device)
        scores.scatter_(2, drafts[..., None], half + 3.0)
        law = DraftLaw(scores, scores.logsumexp(-1))
    verify_lens = torch.full((bs,), _GAMMA, dtype=torch.int64, device=device)
    indptr = torch.arange(0, num_rows + 1, _GAMMA + 1, device=device)
    neutral = [-1] * bs, [1.0] * bs, [0.0] * bs, [None] * bs
    rows = SamplingRows.from_lists([float(sampled)] * bs, *neutral, device)
    requests = torch.arange(bs, device=device)
    keys = RoundKeys(1, torch.zeros((), dtype=torch.int64, device=device), requests, requests)

    def run() -> object:
        return accept(drafts, verify_lens, logits, indptr, law, rows, keys)

    def reference() -> object:
        return accept_ref(drafts, verify_lens, logits, indptr, None if law is None else law.probs(), rows, keys)

    row = vocab_size * logits.element_size()
    redrawn = bs * (row + vocab_size * 4) if sampled else 0  # the row to draw from, and the draft's law of its slot
    return Case(
        name="accept_sampled" if sampled else "accept_greedy",
        shape={"bs": bs, "gamma": _GAMMA, "V": vocab_size},
        run=run,
        reference=reference,
        bytes_moved=num_rows * row + redrawn,
        flops=0,
    )
