"""Confidence logits of whole blocks: hidden states and Markov embeddings of rank 256, 7 slots, bfloat16."""

from __future__ import annotations

from functools import partial

import torch
from dspark_kernels import ConfidenceWeights, block_confidence, block_confidence_ref
from harness import Case

GAMMA, RANK, VOCAB = 7, 256, 151_936
DTYPE = torch.bfloat16


def cases(device: torch.device) -> list[Case]:
    """Every batch size, with the hidden sizes of a small and of a Qwen3-4B drafter."""
    torch.manual_seed(0)
    w1 = torch.randn(VOCAB, RANK, device=device, dtype=DTYPE)
    return [_case(bs, width, w1) for width in (576, 2560) for bs in (1, 8, 64, 256)]


def _case(bs: int, width: int, w1: torch.Tensor) -> Case:
    device = w1.device
    weights = ConfidenceWeights(torch.randn(width + RANK, device=device), torch.zeros(1, device=device))
    hidden = torch.randn(bs, GAMMA, width, device=device, dtype=DTYPE)
    tokens = torch.randint(VOCAB, (bs, GAMMA + 1), device=device)
    arguments = (hidden, tokens[:, 0].contiguous(), tokens[:, 1:].contiguous(), weights, w1)
    return Case(
        name="block_confidence",
        shape={"bs": bs, "gamma": GAMMA, "d": width, "r": RANK},
        run=partial(block_confidence, *arguments),
        reference=partial(block_confidence_ref, *arguments),
        # A row's hidden state, embedding, token and logit; the weights once.
        bytes_moved=bs * GAMMA * ((width + RANK) * DTYPE.itemsize + 8 + 4) + 4 * (width + RANK),
        flops=0,
    )
