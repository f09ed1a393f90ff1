"""Laying out a decode step, and planning verification: half of the drafts by survival, or half of every block."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from cases import Case, case
from dspark_kernels import PreparedStep, StepRequests, VerifyRows, plan_staged, plan_top, plan_uniform, prepare

_CONTEXT = 2048
_MASK_TOKEN = 151_669


def cases(device: torch.device) -> Iterator[Case]:
    """Yield every batch size at gamma 7, and the largest batch that is planned in one launch."""
    for bs, gamma in ((1, 7), (8, 7), (64, 7), (256, 7), (512, 16)):
        yield from _plans(bs, gamma, device)
    for bs in (1, 8, 64, 256):
        yield case(prepare, _requests(bs, 7, device), 7, _MASK_TOKEN, PreparedStep.empty(bs, 7, device))


def _plans(bs: int, gamma: int, device: torch.device) -> Iterator[Case]:
    """Yield a plan by survival, the same in the buffers of a captured step, and a plan of equal lengths."""
    requests, drafts = _requests(bs, gamma, device), torch.randint(0, 150_000, (bs, gamma), device=device)
    survival, budget = torch.rand(bs, gamma, device=device).cumprod(1), bs * gamma // 2
    rows = VerifyRows.empty(bs, bs + budget, device)
    yield case(plan_top, survival, budget, drafts, requests, bs + budget, rows)
    weights, numbers = torch.rand(bs, device=device), torch.tensor([budget, -1, -1], device=device)
    yield case(plan_staged, survival, weights, numbers, drafts, requests, rows)
    num_tokens = bs + bs * (gamma // 2)
    yield case(plan_uniform, gamma // 2, drafts, requests, num_tokens, VerifyRows.empty(bs, num_tokens, device))


def _requests(bs: int, gamma: int, device: torch.device) -> StepRequests:
    """Return requests of a mean context of ``_CONTEXT / 2``, as a captured graph holds them."""
    return StepRequests(
        anchors=torch.randint(0, 150_000, (bs,), device=device),
        prefix_lens=torch.randint(0, _CONTEXT, (bs,), device=device),
        req_pool_indices=torch.randperm(bs, device=device),
        req_to_token=torch.randint(1, 1 << 20, (bs, _CONTEXT + gamma + 1), device=device, dtype=torch.int32),
        num_requests=torch.tensor([bs], device=device),
    )
