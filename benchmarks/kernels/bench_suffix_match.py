"""Candidates for 7 slots and the token behind them, from texts of one length and of another."""

from __future__ import annotations

from functools import partial

import torch
from dspark_kernels import StepRequests, suffix_match, suffix_match_ref
from harness import Case

GAMMA, VOCAB = 7, 150_000


def cases(device: torch.device) -> list[Case]:
    """Every batch size, contexts that are short and long; texts in which little repeats."""
    torch.manual_seed(0)
    return [_case(bs, context, device) for context in (2048, 32_768) for bs in (1, 8, 64)]


def _case(bs: int, context: int, device: torch.device) -> Case:
    num_slots = bs * context
    requests = StepRequests(
        anchors=torch.randint(VOCAB, (bs,), device=device),
        prefix_lens=torch.full((bs,), context - 1, device=device),
        req_pool_indices=torch.arange(bs, device=device),
        req_to_token=torch.arange(num_slots, device=device, dtype=torch.int32).view(bs, context),
    )
    slot_tokens = torch.randint(VOCAB, (num_slots,), device=device)
    arguments = (requests, slot_tokens, GAMMA + 1)
    return Case(
        name="suffix_match",
        shape={"bs": bs, "context": context, "gamma": GAMMA},
        run=partial(suffix_match, *arguments),
        reference=partial(suffix_match_ref, *arguments),
        bytes_moved=12 * num_slots,
        flops=0,
    )
