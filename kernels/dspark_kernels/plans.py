"""Plans a verification: which drafts become rows of its flattened batch, in one launch, and in plain torch.

Every program selects for itself, then writes the rows of its own share of the requests: the selection is a few
microseconds of arithmetic on at most 32 KiB, and repeating it costs nothing while a second launch would. The smallest
admitted survival is found bit by bit (the bits of a non-negative float grow with its value), which needs nothing but
sums over a tile; a sort of 8192 keys would take 91 exchange stages and far longer to compile.

Bytes: 4 bs depth of survivals, 12 per verified draft and 28 per request read, 40 per row of the tier and 20 per request
written. That is about 0.12 MB when 256 requests verify 7 drafts each: latency is the cost.
"""

from __future__ import annotations

from dataclasses import fields

import torch
import triton
import triton.language as tl

from dspark_kernels.dispatch import on_kernels
from dspark_kernels.preparation import StepRequests, VerifyRows

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


# Survivals of one program's tile, at 16 per thread of 16 warps; more are planned by the torch form.
_MAX_CANDIDATES = 8192
_MAX_WARPS = 16
_CANDIDATES_PER_WARP = 256
_REQUESTS_PER_WARP = 64
_REQUESTS_PER_PROGRAM = 32
_PADDING_ROWS_PER_STORE = 256
# The smallest tile: one warp of work, and one compiled form for all steps that fit into it.
_MIN_BLOCK_R = 32
_MIN_BLOCK_J = 8
_FORCED = tl.constexpr(FORCED)


@triton.jit
def _top_lens(survival, is_candidate, budget):
    """[BLOCK_R] int32 lengths: the ``budget`` largest of survival [BLOCK_R, BLOCK_J], never a negative one."""
    admissible = is_candidate & (survival >= 0.0)
    # The absolute value makes -0.0 equal to 0.0 in its bits too.
    keys = tl.where(admissible, tl.abs(survival).to(tl.int32, bitcast=True), -1)
    # The largest value that at least `budget` keys reach; 0 when there are fewer than `budget` of them.
    lowest = tl.full([], 0, tl.int32)
    for step in range(31):
        trial = lowest | (1 << (30 - step))
        reached = tl.sum(tl.where(keys >= trial, 1, 0))
        lowest = tl.where(reached >= budget, trial, lowest)
    above = keys > lowest
    # What is left of the budget goes to the keys at the limit, by position and then by request.
    equal = tl.where(keys == lowest, 1, 0)
    per_position = tl.sum(equal, 0)
    before = tl.cumsum(per_position, 0) - per_position
    rank = tl.cumsum(equal, 0) + before[None, :]
    left = budget - tl.sum(tl.where(above, 1, 0))
    admitted = above | ((equal > 0) & (rank <= left))
    return tl.sum(tl.where(admitted, 1, 0), 1)


# Sizes and depths change from step to step; specialising on them would compile the kernel again and again.
@triton.jit(
    do_not_specialize=["budget", "num_requests", "draft_stride", "bs", "num_slots", "num_tokens", "depth"],
    do_not_specialize_on_alignment=["survival_ptr", "weights_ptr", "draft_tokens_ptr"],
)
def _plan_kernel(
    survival_ptr,  # None with UNIFORM
    weights_ptr,  # [bs] with STAGED
    draft_tokens_ptr,
    anchors_ptr,
    prefix_lens_ptr,
    req_pool_indices_ptr,
    req_to_token_ptr,
    verify_lens_ptr,
    indptr_ptr,
    requests_ptr,
    columns_ptr,
    input_ids_ptr,
    positions_ptr,
    slots_ptr,
    budget,
    numbers_ptr,  # [3] with STAGED: the budget, drafts of every request or -1, a request whose drafts come first or -1
    num_requests,  # a pointer with COUNT_ON_DEVICE
    draft_stride,
    table_stride,
    bs,
    num_slots,
    num_tokens,
    depth,
    UNIFORM: tl.constexpr,
    STAGED: tl.constexpr,
    COUNT_ON_DEVICE: tl.constexpr,
    BLOCK_R: tl.constexpr,  # >= bs
    BLOCK_J: tl.constexpr,  # >= depth
    SHARE: tl.constexpr,  # requests whose rows a program writes
    BLOCK_P: tl.constexpr,
):
    share = tl.program_id(0)
    request = tl.arange(0, BLOCK_R)
    draft = tl.arange(0, BLOCK_J)
    num_real = tl.minimum(tl.load(num_requests).to(tl.int32), bs) if COUNT_ON_DEVICE else num_requests
    real = request < num_real
    mine = (request // SHARE == share) & (request < bs)
    # Before the selection, so that these loads, which depend on one another, do not come on top of it.
    to_read = mine & real
    anchor = tl.load(anchors_ptr + request, mask=to_read, other=0).to(tl.int64)
    prefix = tl.load(prefix_lens_ptr + request, mask=to_read, other=0).to(tl.int64)
    table = tl.load(req_pool_indices_ptr + request, mask=to_read, other=0).to(tl.int64) * table_stride
    anchor_slot = tl.load(req_to_token_ptr + table + prefix, mask=to_read, other=0).to(tl.int64)

    if UNIFORM:
        lens = tl.where(real, depth, 0)
    else:
        wanted = tl.load(numbers_ptr).to(tl.int32) if STAGED else budget
        is_candidate = real[:, None] & (draft < depth)[None, :]
        survival = tl.load(survival_ptr + request[:, None] * depth + draft[None, :], mask=is_candidate, other=-1.0).to(
            tl.float32
        )
        if STAGED:
            survival *= tl.load(weights_ptr + request, mask=real, other=1.0)[:, None]
            forced = tl.load(numbers_ptr + 2).to(tl.int32)
            survival = tl.where((request == forced)[:, None], _FORCED, survival)
        lens = _top_lens(survival, is_candidate, tl.minimum(wanted, num_tokens - num_real))
        if STAGED:
            verify_len = tl.load(numbers_ptr + 1).to(tl.int32)
            lens = tl.where(verify_len < 0, lens, tl.where(real, verify_len, 0))

    num_rows = tl.where(real, lens + 1, 0)
    start = tl.cumsum(num_rows, 0) - num_rows
    total = tl.sum(num_rows, 0)
    tl.store(verify_lens_ptr + request, lens.to(tl.int64), mask=mine)
    tl.store(indptr_ptr + request, start.to(tl.int64), mask=mine)
    # Every program writes the same number: cheaper than finding out which one should.
    tl.store(indptr_ptr + bs, total.to(tl.int64))
    for first in range(bs + share * BLOCK_P, num_slots, tl.num_programs(0) * BLOCK_P):
        spare = first + tl.arange(0, BLOCK_P)
        tl.store(verify_lens_ptr + spare, tl.zeros([BLOCK_P], tl.int64), mask=spare < num_slots)
        tl.store(indptr_ptr + 1 + spare, tl.zeros([BLOCK_P], tl.int64) + total, mask=spare < num_slots)

    is_anchor = to_read & (start < num_tokens)
    tl.store(requests_ptr + start, request.to(tl.int64), mask=is_anchor)
    tl.store(columns_ptr + start, tl.zeros([BLOCK_R], tl.int64), mask=is_anchor)
    tl.store(input_ids_ptr + start, anchor, mask=is_anchor)
    tl.store(positions_ptr + start, prefix, mask=is_anchor)
    tl.store(slots_ptr + start, anchor_slot, mask=is_anchor)

    row = start[:, None] + 1 + draft[None, :]
    is_row = is_anchor[:, None] & (draft[None, :] < lens[:, None]) & (row < num_tokens)
    position = prefix[:, None] + 1 + draft[None, :]
    token = tl.load(
        draft_tokens_ptr + request[:, None].to(tl.int64) * draft_stride + draft[None, :], mask=is_row, other=0
    ).to(tl.int64)
    slot = tl.load(req_to_token_ptr + table[:, None] + position, mask=is_row, other=0).to(tl.int64)
    owner = tl.broadcast_to(request[:, None], [BLOCK_R, BLOCK_J]).to(tl.int64)
    column = tl.broadcast_to(draft[None, :] + 1, [BLOCK_R, BLOCK_J]).to(tl.int64)
    tl.store(requests_ptr + row, owner, mask=is_row)
    tl.store(columns_ptr + row, column, mask=is_row)
    tl.store(input_ids_ptr + row, token, mask=is_row)
    tl.store(positions_ptr + row, position, mask=is_row)
    tl.store(slots_ptr + row, slot, mask=is_row)

    zeros = tl.zeros([BLOCK_P], tl.int64)
    for first in range(total + share * BLOCK_P, num_tokens, tl.num_programs(0) * BLOCK_P):
        padding = first + tl.arange(0, BLOCK_P)
        is_padding = padding < num_tokens
        tl.store(requests_ptr + padding, zeros, mask=is_padding)
        tl.store(columns_ptr + padding, zeros + (depth + 1), mask=is_padding)
        tl.store(input_ids_ptr + padding, zeros, mask=is_padding)
        tl.store(positions_ptr + padding, zeros, mask=is_padding)
        tl.store(slots_ptr + padding, zeros, mask=is_padding)


@on_kernels(plan_top_ref)
def plan_top(
    survival: torch.Tensor,  # [at least the real requests, depth] float
    budget: int,
    draft_tokens: torch.Tensor,  # [bs, at least depth] int
    requests: StepRequests,
    num_tokens: int,
    out: VerifyRows | None = None,
) -> VerifyRows:
    """Verify the ``budget`` drafts with the largest survivals. No host sync; safe under graph capture.

    Ties go to the smaller position, then to the smaller request: no draft is admitted without its predecessor.

    Args:
        survival: non-increasing along a row, without NaN; entries above 1 are admitted first, negative ones never.
        budget: drafts to admit; no more are than the tier has rows for.
        draft_tokens: the proposals.
        requests: the step's requests; no survival of padding is looked at.
        num_tokens: rows of the tier, at least one per request.
        out: buffers of at least bs request slots and of ``num_tokens`` rows; new ones by default.

    Raises:
        ValueError: a tier without room for the anchors, or buffers of another size.
    """
    depth = survival.shape[1]
    block_r, block_j = _blocks(len(requests), depth)
    if block_r * block_j > _MAX_CANDIDATES:
        return plan_top_ref(survival, budget, draft_tokens, requests, num_tokens, out)
    return _launch(survival, budget, depth, draft_tokens, requests, num_tokens, out)


@on_kernels(plan_staged_ref)
def plan_staged(
    survival: torch.Tensor,  # [bs, depth] float
    weights: torch.Tensor,  # [bs] float32
    numbers: torch.Tensor,  # [3] int64
    draft_tokens: torch.Tensor,  # [bs, at least depth] int
    requests: StepRequests,
    out: VerifyRows,
) -> VerifyRows:
    """Plan with numbers that lie on the device: captured once, and told before each replay what to do.

    Args:
        weights: above 0 and at most 1: what ranks is a survival times that of its request.
        numbers: how many drafts to admit as :func:`plan_top` does; unless it is negative, how many of every request to
            admit instead, as :func:`plan_uniform` does; and the request whose drafts come first of all, or -1.
        out: buffers of at least bs request slots, and of as many rows as any step needs.

    The other arguments are those of :func:`plan_top`. No host sync; safe under graph capture.
    """
    block_r, block_j = _blocks(*survival.shape)
    if block_r * block_j > _MAX_CANDIDATES:
        return plan_staged_ref(survival, weights, numbers, draft_tokens, requests, out)
    return _launch(survival, numbers, survival.shape[1], draft_tokens, requests, len(out.input_ids), out, weights)


@on_kernels(plan_uniform_ref)
def plan_uniform(
    verify_len: int,
    draft_tokens: torch.Tensor,  # [bs, at least verify_len] int
    requests: StepRequests,
    num_tokens: int,
    out: VerifyRows | None = None,
) -> VerifyRows:
    """Verify the first ``verify_len`` drafts of every request. No host sync; safe under graph capture.

    Args:
        verify_len: 0 is a non-speculative step.
        num_tokens: rows of the tier, at least ``verify_len + 1`` per request.

    The other arguments and errors are those of :func:`plan_top`.
    """
    return _launch(None, 0, verify_len, draft_tokens, requests, num_tokens, out)


def _blocks(bs: int, depth: int) -> tuple[int, int]:
    """BLOCK_R and BLOCK_J of the kernel."""
    return max(_MIN_BLOCK_R, triton.next_power_of_2(bs)), max(_MIN_BLOCK_J, triton.next_power_of_2(max(1, depth)))


def _launch(
    survival: torch.Tensor | None,
    wanted: torch.Tensor | int,  # the budget, or the numbers of a staged plan
    depth: int,
    draft_tokens: torch.Tensor,
    requests: StepRequests,
    num_tokens: int,
    out: VerifyRows | None,
    weights: torch.Tensor | None = None,
) -> VerifyRows:
    bs = len(requests)
    min_rows = bs if survival is not None else bs * (depth + 1)
    if requests.num_requests is None and num_tokens < min_rows:
        raise ValueError(f"num_tokens={num_tokens} where {bs} requests need {min_rows} rows")
    out = VerifyRows.empty(bs, num_tokens, requests.anchors.device) if out is None else out
    if out.verify_lens.shape[0] < bs or out.input_ids.shape[0] != num_tokens:
        raise ValueError(
            f"out has {out.verify_lens.shape[0]} request slots and {out.input_ids.shape[0]} rows where {bs} and "
            f"{num_tokens} are needed"
        )
    drafts = draft_tokens if draft_tokens.stride(1) == 1 else draft_tokens.contiguous()
    staged = isinstance(wanted, torch.Tensor)
    block_r, block_j = _blocks(bs, depth)
    _plan_kernel[(triton.cdiv(bs, _REQUESTS_PER_PROGRAM),)](
        None if survival is None else survival.contiguous(),
        weights,
        drafts,
        requests.anchors,
        requests.prefix_lens,
        requests.req_pool_indices,
        requests.req_to_token,
        out.verify_lens,
        out.indptr,
        out.requests,
        out.columns,
        out.input_ids,
        out.positions,
        out.slots,
        0 if staged else wanted,
        wanted if staged else None,
        bs if requests.num_requests is None else requests.num_requests,
        drafts.stride(0),
        requests.req_to_token.stride(0),
        bs,
        out.verify_lens.shape[0],
        num_tokens,
        depth,
        UNIFORM=survival is None,
        STAGED=staged,
        COUNT_ON_DEVICE=requests.num_requests is not None,
        BLOCK_R=block_r,
        BLOCK_J=block_j,
        SHARE=_REQUESTS_PER_PROGRAM,
        BLOCK_P=_PADDING_ROWS_PER_STORE,
        num_warps=min(_MAX_WARPS, max(1, block_r * block_j // _CANDIDATES_PER_WARP, block_r // _REQUESTS_PER_WARP)),
    )
    return out
