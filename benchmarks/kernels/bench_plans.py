"""Planning verification: half of the drafts by survival, and the first half of every block."""

from __future__ import annotations

from functools import partial

import torch
from dspark_kernels import (
    StepRequests,
    VerifyRows,
    plan_staged,
    plan_staged_ref,
    plan_top,
    plan_top_ref,
    plan_uniform,
    plan_uniform_ref,
)
from harness import Case

CONTEXT = 2048


def cases(device: torch.device) -> list[Case]:
    """Every batch size at gamma 7; the largest batch that is planned in one launch."""
    torch.manual_seed(0)
    sizes = [(1, 7), (8, 7), (64, 7), (256, 7), (512, 16)]
    forms = (_top, _staged, _uniform)
    return [form(bs, gamma, device) for bs, gamma in sizes for form in forms]


def step_requests(bs: int, gamma: int, device: torch.device) -> StepRequests:
    """Requests of a mean context of ``CONTEXT / 2``, as a captured graph holds them."""
    return StepRequests(
        anchors=torch.randint(0, 150_000, (bs,), device=device),
        prefix_lens=torch.randint(0, CONTEXT, (bs,), device=device),
        req_pool_indices=torch.randperm(bs, device=device),
        req_to_token=torch.randint(1, 1 << 20, (bs, CONTEXT + gamma + 1), device=device, dtype=torch.int32),
        num_requests=torch.tensor([bs], device=device),
    )


def _top(bs: int, gamma: int, device: torch.device) -> Case:
    budget = bs * gamma // 2
    survival = torch.rand(bs, gamma, device=device).cumprod(1)
    arguments = (survival, budget, _drafts(bs, gamma, device))
    return _case("plan_top", (plan_top, plan_top_ref), arguments, bs, gamma, budget, 4 * survival.numel(), device)


def _staged(bs: int, gamma: int, device: torch.device) -> Case:
    """Return the case of :func:`_top` in the buffers of a captured step."""
    budget = bs * gamma // 2
    survival, numbers = torch.rand(bs, gamma, device=device).cumprod(1), torch.tensor([budget, -1, -1], device=device)
    inputs = survival, numbers, _drafts(bs, gamma, device), step_requests(bs, gamma, device)
    num_tokens = bs + budget
    return Case(
        name="plan_staged",
        shape={"bs": bs, "gamma": gamma, "verified": budget},
        run=partial(plan_staged, *inputs, VerifyRows.empty(bs, num_tokens, device)),
        reference=partial(plan_staged_ref, *inputs, VerifyRows.empty(bs, num_tokens, device)),
        bytes_moved=_bytes(bs, budget) + 4 * survival.numel(),
        flops=0,
    )


def _bytes(bs: int, verified: int) -> int:
    """A draft and its slot; anchor, length, table row and slot; five columns of rows; lengths and first rows."""
    return 12 * verified + 28 * bs + 40 * (bs + verified) + 20 * bs


def _uniform(bs: int, gamma: int, device: torch.device) -> Case:
    arguments = (gamma // 2, _drafts(bs, gamma, device))
    return _case("plan_uniform", (plan_uniform, plan_uniform_ref), arguments, bs, gamma, bs * (gamma // 2), 0, device)


def _drafts(bs: int, gamma: int, device: torch.device) -> torch.Tensor:
    return torch.randint(0, 150_000, (bs, gamma), device=device)


def _case(
    name: str,
    forms: tuple,
    arguments: tuple,
    bs: int,
    gamma: int,
    verified: int,
    extra_bytes: int,
    device: torch.device,
) -> Case:
    num_tokens = bs + verified
    inputs = (*arguments, step_requests(bs, gamma, device), num_tokens, VerifyRows.empty(bs, num_tokens, device))
    kernel, reference = forms
    return Case(
        name=name,
        shape={"bs": bs, "gamma": gamma, "verified": verified},
        run=partial(kernel, *inputs),
        reference=partial(reference, *inputs),
        bytes_moved=_bytes(bs, verified) + extra_bytes,
        flops=0,
    )
