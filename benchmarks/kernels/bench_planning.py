"""Laying out a decode step, and planning verification: half of the drafts by survival, or half of every block."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from dspark_kernels import PreparedStep, StepRequests, VerifyRows, plan_staged, plan_top, plan_uniform, prepare
from harness import Case, case

_CONTEXT = 2048
_MASK_TOKEN = 151_669


def cases(device: torch.device) -> Iterator[Case]:
    """Yield every batch size at gamma 7, and the largest batch that is planned in one launch."""
    for bs, gamma in ((1, 7), (8, 7), (64, 7), (256, 7), (512, 16)):
        yield from _plans(bs, gamma, device)
    for bs in (1, 8, 64, 256):
        out = PreparedStep.empty(bs, 7, device)
        written = sum(buffer.nbytes for buffer in vars(out).values())
        shape, requests = {"bs": bs, "gamma": 7}, _requests(bs, 7, device)
        yield case(prepare, shape, requests, 7, _MASK_TOKEN, out, bytes_moved=written + bs * 3 * 8)


def _plans(bs: int, gamma: int, device: torch.device) -> Iterator[Case]:
    """Yield a plan by survival, the same in the buffers of a captured step, and a plan of equal lengths."""
    requests, drafts = _requests(bs, gamma, device), torch.randint(0, 150_000, (bs, gamma), device=device)
    survival, budget = torch.rand(bs, gamma, device=device).cumprod(1), bs * gamma // 2
    rows, num_tokens = VerifyRows.empty(bs, bs + budget, device), bs + budget
    shape, moved = {"bs": bs, "gamma": gamma, "verified": budget}, _bytes(bs, budget) + 4 * survival.numel()
    yield case(plan_top, shape, survival, budget, drafts, requests, num_tokens, rows, bytes_moved=moved)
    numbers = torch.tensor([budget, -1, -1], device=device)
    yield case(plan_staged, shape, survival, numbers, drafts, requests, rows, bytes_moved=moved)
    verified = bs * (gamma // 2)
    rows, num_tokens, shape = VerifyRows.empty(bs, bs + verified, device), bs + verified, shape | {"verified": verified}
    moved = _bytes(bs, verified)
    yield case(plan_uniform, shape, gamma // 2, drafts, requests, num_tokens, rows, bytes_moved=moved)


def _requests(bs: int, gamma: int, device: torch.device) -> StepRequests:
    """Return requests of a mean context of ``_CONTEXT / 2``, as a captured graph holds them."""
    return StepRequests(
        anchors=torch.randint(0, 150_000, (bs,), device=device),
        prefix_lens=torch.randint(0, _CONTEXT, (bs,), device=device),
        req_pool_indices=torch.randperm(bs, device=device),
        req_to_token=torch.randint(1, 1 << 20, (bs, _CONTEXT + gamma + 1), device=device, dtype=torch.int32),
        num_requests=torch.tensor([bs], device=device),
    )


def _bytes(bs: int, verified: int) -> int:
    """Return a draft and its slot; anchor, length, table row and slot; five columns of rows; lengths and first rows."""
    return 12 * verified + 28 * bs + 40 * (bs + verified) + 20 * bs
