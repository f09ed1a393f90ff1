"""Acceptance by chance: what a server that simulates it adds to a step."""

from __future__ import annotations

from functools import partial

import torch
from dspark_kernels import Accepted, RoundKeys, simulated_accept, simulated_accept_ref
from harness import Case

GAMMA = 7


def cases(device: torch.device) -> list[Case]:
    """Whole blocks, every draft kept with probability 0.8."""
    found = []
    for bs in (1, 64, 256):
        requests = torch.arange(bs, device=device)
        judged = Accepted(requests, requests, torch.zeros(bs, GAMMA + 1, dtype=torch.int64, device=device), requests)
        drafts = torch.zeros(bs, GAMMA, dtype=torch.int64, device=device)
        probabilities = torch.full((GAMMA,), 0.8, dtype=torch.float64, device=device)
        keys = RoundKeys(1, torch.zeros((), dtype=torch.int64, device=device), requests, requests)
        arguments = (judged, drafts, torch.full_like(requests, GAMMA), probabilities, keys)
        found.append(
            Case(
                name="simulated_accept",
                shape={"bs": bs, "gamma": GAMMA},
                run=partial(simulated_accept, *arguments),
                reference=partial(simulated_accept_ref, *arguments),
                bytes_moved=bs * 8 * (2 * GAMMA + 8),
                flops=0,
            )
        )
    return found
