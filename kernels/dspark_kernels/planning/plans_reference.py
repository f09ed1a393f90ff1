"""Planning a verification in plain torch: what the kernel of ``plans.py`` computes."""

from __future__ import annotations

from dataclasses import fields

import torch

from dspark_kernels.planning.preparation import StepRequests
from dspark_kernels.planning.windows import VerifyRows

FORCED = 2.0
"""What drafts rank by that are admitted before all others: survivals are probabilities."""


def plan_top_ref(
    survival: torch.Tensor,  # [bs, depth] float
    budget: int,
    draft_tokens: torch.Tensor,  # [bs, at least depth] int
    requests: StepRequests,
    num_tokens: int,
    out: VerifyRows | None = None,
) -> VerifyRows:
    """Compute the same as :func:`plan_top` in plain torch. No host sync."""
    real, num_real = _real_requests(requests, survival.device)
    survival = torch.nn.functional.pad(survival, (0, 0, 0, len(requests) - survival.shape[0]))
    lens = _top_lens_ref(survival, real, (num_tokens - num_real).clamp(max=budget))
    return _flatten_ref(lens, real, draft_tokens[:, : survival.shape[1]], requests, num_tokens, out)


def plan_staged_ref(
    survival: torch.Tensor,  # [bs, depth] float
    weights: torch.Tensor,  # [bs] float32
    numbers: torch.Tensor,  # [3] int64
    draft_tokens: torch.Tensor,  # [bs, at least depth] int
    requests: StepRequests,
    out: VerifyRows,
) -> VerifyRows:
    """Compute the same as :func:`plan_staged` in plain torch. No host sync."""
    (bs, depth), device, num_tokens = survival.shape, survival.device, len(out.input_ids)
    budget, verify_len, forced = numbers.unbind()
    real, num_real = _real_requests(requests, device)
    survival = (survival * weights[:, None]).masked_fill((torch.arange(bs, device=device) == forced)[:, None], FORCED)
    top = _top_lens_ref(survival, real, torch.minimum(budget, num_tokens - num_real))
    lens = torch.where(verify_len < 0, top, real * verify_len)
    return _flatten_ref(lens, real, draft_tokens[:, :depth], requests, num_tokens, out)


def plan_uniform_ref(
    verify_len: int,
    draft_tokens: torch.Tensor,  # [bs, at least verify_len] int
    requests: StepRequests,
    num_tokens: int,
    out: VerifyRows | None = None,
) -> VerifyRows:
    """Compute the same as :func:`plan_uniform` in plain torch. No host sync."""
    real, _ = _real_requests(requests, requests.anchors.device)
    return _flatten_ref(real * verify_len, real, draft_tokens[:, :verify_len], requests, num_tokens, out)


def _top_lens_ref(survival: torch.Tensor, real: torch.Tensor, budget: torch.Tensor) -> torch.Tensor:
    """[bs] int64 lengths of the ``budget`` best drafts of the real requests; survival [bs, depth], real [bs] bool."""
    bs, depth = survival.shape
    survival = survival.masked_fill(~real[:, None], -1.0)
    # Laid out position by position, a stable sort breaks ties in the order stated in plan_top.
    ranked = survival.T.reshape(-1).sort(descending=True, stable=True)
    admitted = torch.empty(depth * bs, dtype=torch.bool, device=survival.device)
    admitted[ranked.indices] = torch.arange(depth * bs, device=survival.device) < budget
    return (admitted.view(depth, bs) & (survival.T >= 0)).sum(0)


def _real_requests(requests: StepRequests, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """[bs] bool and their number [1]."""
    if requests.num_requests is None:
        num_real = torch.full((1,), len(requests), dtype=torch.int64, device=device)
    else:
        num_real = requests.num_requests
    return torch.arange(len(requests), device=device) < num_real, num_real


def _flatten_ref(
    lens: torch.Tensor,  # [bs] int64
    real: torch.Tensor,  # [bs] bool
    drafts: torch.Tensor,  # [bs, depth]
    requests: StepRequests,
    num_tokens: int,
    out: VerifyRows | None,
) -> VerifyRows:
    (bs, depth), device = drafts.shape, drafts.device
    spare = 0 if out is None else len(out.verify_lens) - bs
    indptr = torch.nn.functional.pad(torch.nn.functional.pad((lens + 1) * real, (0, spare)).cumsum(0), (1, 0))
    row = torch.arange(num_tokens, device=device)
    is_row = row < indptr[-1]
    request = (torch.searchsorted(indptr, row, right=True) - 1).clamp_max(bs - 1)
    column = torch.where(is_row, row - indptr[request], 0)
    position = (requests.prefix_lens.to(torch.int64)[request] + column) * is_row
    table_row = requests.req_pool_indices[request] * is_row
    window = torch.cat([requests.anchors[:, None], drafts], dim=1).to(torch.int64)
    found = VerifyRows(
        verify_lens=torch.nn.functional.pad(lens, (0, spare)),
        indptr=indptr,
        requests=request * is_row,
        columns=torch.where(is_row, column, depth + 1),
        input_ids=window[request, column] * is_row,
        positions=position,
        slots=requests.req_to_token[table_row, position].to(torch.int64) * is_row,
    )
    if out is None:
        return found
    for field in fields(found):
        getattr(out, field.name).copy_(getattr(found, field.name))
    return out
