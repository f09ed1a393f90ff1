"""Prepares a decode step on the device, in one launch: requests, draft blocks, positions, and the rows of each request.

The outputs may be longer than the batch: a CUDA graph is captured for a number of request slots, and the step's
requests are staged into its buffers. What stands after them is padding that is safe to compute with: context length 0,
row 0 of the slot table, a block of masks.

Bytes: per request slot 8 * (2 gamma + 3) written and 24 read. That is 0.04 MB for 256 requests with gamma 7: the launch
is the cost.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
import triton
import triton.language as tl

from dspark_kernels.dispatch import on_kernels

_REQUESTS_PER_PROGRAM = 16


@dataclass(frozen=True)
class StepRequests:
    """The requests of a decode step, as the engine hands them over.

    Attributes:
        anchors: [bs] int, last committed token.
        prefix_lens: [bs] int, tokens whose K/V is committed; the anchor's position.
        req_pool_indices: [bs] int, rows of ``req_to_token``.
        req_to_token: [rows, columns] int, K/V slot of every position of every request; columns are contiguous.
        num_requests: [1] int64 on the device, or None if all of them are real. Requests from there on are padding.
    """

    anchors: torch.Tensor
    prefix_lens: torch.Tensor
    req_pool_indices: torch.Tensor
    req_to_token: torch.Tensor
    num_requests: torch.Tensor | None = None

    def __len__(self) -> int:
        return self.anchors.shape[0]


@dataclass(frozen=True)
class PreparedStep:
    """Inputs of drafting and planning for S request slots, the step's bs requests first.

    Attributes:
        block_ids: [S, gamma] int64, the anchor and masks after it.
        positions: [S, gamma] int64 of the block, prefix_lens + 0..gamma - 1.
        anchors, prefix_lens, req_pool_indices: [S] int64; 0 after the requests.
        num_requests: [1] int64, bs.
        numbers: [3] int64, what :func:`dspark_kernels.plan_staged` does.
    """

    block_ids: torch.Tensor
    positions: torch.Tensor
    anchors: torch.Tensor
    prefix_lens: torch.Tensor
    req_pool_indices: torch.Tensor
    num_requests: torch.Tensor
    numbers: torch.Tensor

    @classmethod
    def empty(cls, num_slots: int, gamma: int, device: torch.device | str) -> PreparedStep:
        """Return buffers that :func:`prepare` fills."""

        def int64(*shape: int) -> torch.Tensor:
            return torch.empty(shape, dtype=torch.int64, device=device)

        return cls(
            block_ids=int64(num_slots, gamma),
            positions=int64(num_slots, gamma),
            anchors=int64(num_slots),
            prefix_lens=int64(num_slots),
            req_pool_indices=int64(num_slots),
            num_requests=int64(1),
            numbers=int64(3),
        )

    def block(self, num_slots: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the ids and positions [num_slots, gamma] of the first blocks."""
        return self.block_ids[:num_slots], self.positions[:num_slots]

    def requests(self, req_to_token: torch.Tensor, num_slots: int | None = None) -> StepRequests:
        """Return the same requests as the input of what follows, in the first ``num_slots`` slots; None takes all."""
        return StepRequests(
            self.anchors[:num_slots],
            self.prefix_lens[:num_slots],
            self.req_pool_indices[:num_slots],
            req_to_token,
            self.num_requests,
        )


class PlanNumbers(NamedTuple):
    """The numbers of a plan that the host decides before anything is drafted.

    Attributes:
        budget: drafts verified in all, those that rank highest.
        verify_len: drafts that every request verifies instead; -1 where they rank.
        forced: request whose drafts come before all others; -1 for none.
    """

    budget: int = 0
    verify_len: int = -1
    forced: int = -1


NO_PLAN = PlanNumbers()


def prepare_ref(
    requests: StepRequests,
    gamma: int,
    mask_token_id: int,
    out: PreparedStep | None = None,
    numbers: PlanNumbers = NO_PLAN,
) -> PreparedStep:
    """Compute the same as :func:`prepare` in plain torch. No host sync."""
    bs, device = len(requests), requests.anchors.device
    out = PreparedStep.empty(bs, gamma, device) if out is None else out
    for column in (out.anchors, out.prefix_lens, out.req_pool_indices):
        column[bs:] = 0
    out.anchors[:bs] = requests.anchors
    out.prefix_lens[:bs] = requests.prefix_lens
    out.req_pool_indices[:bs] = requests.req_pool_indices
    out.num_requests.fill_(bs)
    for index, number in enumerate(numbers):
        out.numbers[index] = number

    out.block_ids.fill_(mask_token_id)
    out.block_ids[:bs, 0] = requests.anchors
    torch.add(out.prefix_lens[:, None], torch.arange(gamma, device=device), out=out.positions)
    return out


# Batch sizes change all the time; specialising on them would compile the kernel again and again.
@triton.jit(do_not_specialize=["bs", "num_slots", "mask_token_id", "budget", "verify_len", "forced"])
def _prepare_kernel(
    anchors_ptr,
    prefix_lens_ptr,
    req_pool_indices_ptr,
    block_ids_ptr,
    positions_ptr,
    out_anchors_ptr,
    out_prefix_lens_ptr,
    out_req_pool_indices_ptr,
    num_requests_ptr,
    numbers_ptr,
    bs,
    num_slots,
    mask_token_id,
    budget,
    verify_len,
    forced,
    GAMMA: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_C: tl.constexpr,  # >= GAMMA
):
    requests = tl.program_id(0) * BLOCK_R + tl.arange(0, BLOCK_R)
    real = requests < bs
    in_slots = requests < num_slots
    anchors = tl.load(anchors_ptr + requests, mask=real, other=0).to(tl.int64)
    prefix_lens = tl.load(prefix_lens_ptr + requests, mask=real, other=0).to(tl.int64)
    table_rows = tl.load(req_pool_indices_ptr + requests, mask=real, other=0).to(tl.int64)
    tl.store(out_anchors_ptr + requests, anchors, mask=in_slots)
    tl.store(out_prefix_lens_ptr + requests, prefix_lens, mask=in_slots)
    tl.store(out_req_pool_indices_ptr + requests, table_rows, mask=in_slots)
    # Every program writes the same numbers: cheaper than finding out which one should.
    tl.store(num_requests_ptr, bs.to(tl.int64))
    tl.store(numbers_ptr, budget.to(tl.int64))
    tl.store(numbers_ptr + 1, verify_len.to(tl.int64))
    tl.store(numbers_ptr + 2, forced.to(tl.int64))

    columns = tl.arange(0, BLOCK_C)
    is_anchor = real[:, None] & (columns == 0)[None, :]
    ids = tl.where(is_anchor, anchors[:, None], mask_token_id)
    offsets = requests[:, None].to(tl.int64) * GAMMA + columns[None, :]
    in_block = in_slots[:, None] & (columns < GAMMA)[None, :]
    tl.store(block_ids_ptr + offsets, ids, mask=in_block)
    tl.store(positions_ptr + offsets, prefix_lens[:, None] + columns[None, :], mask=in_block)


@on_kernels(prepare_ref)
def prepare(
    requests: StepRequests,
    gamma: int,
    mask_token_id: int,
    out: PreparedStep | None = None,
    numbers: PlanNumbers = NO_PLAN,
) -> PreparedStep:
    """Lay out the step. No host sync; safe under graph capture.

    Args:
        requests: all real: their number is known to the host, which launches for them.
        gamma: slots of a draft block.
        out: buffers of at least bs request slots, as a captured graph has them; new ones by default.
        numbers: what a captured plan does with the blocks.

    Raises:
        ValueError: buffers of another shape.
    """
    bs, device = len(requests), requests.anchors.device
    out = PreparedStep.empty(bs, gamma, device) if out is None else out
    num_slots = out.anchors.shape[0]
    if num_slots < bs or out.block_ids.shape[1] != gamma:
        raise ValueError(
            f"out has {num_slots} request slots and gamma {out.block_ids.shape[1]} where {bs} requests and gamma "
            f"{gamma} are to be staged"
        )
    _prepare_kernel[(max(1, triton.cdiv(num_slots, _REQUESTS_PER_PROGRAM)),)](
        requests.anchors,
        requests.prefix_lens,
        requests.req_pool_indices,
        out.block_ids,
        out.positions,
        out.anchors,
        out.prefix_lens,
        out.req_pool_indices,
        out.num_requests,
        out.numbers,
        bs,
        num_slots,
        mask_token_id,
        *numbers,
        GAMMA=gamma,
        BLOCK_R=_REQUESTS_PER_PROGRAM,
        BLOCK_C=triton.next_power_of_2(gamma),
        num_warps=1,
    )
    return out


@dataclass(frozen=True)
class Windows:
    """Each request's rows: its anchor and its verified drafts, one request after the other.

    Attributes:
        verify_lens: [bs] int, drafts verified, 0..gamma; 0 is a plain decode step.
        indptr: [bs + 1] int, first row of each request; rows from ``indptr[bs]`` on are padding.
    """

    verify_lens: torch.Tensor
    indptr: torch.Tensor


@dataclass(frozen=True)
class VerifyRows(Windows):
    """The tokens to be verified, flattened request by request, for bs request slots and a tier of N rows.

    Rows from ``indptr[bs]`` on are padding: token 0 at position 0 of K/V slot 0, of request 0, in a column beyond
    any draft, so that no row of it is ever committed. Request slots without a request have no rows.

    Attributes:
        verify_lens: [bs] int64, drafts verified.
        indptr: [bs + 1] int64, first row of each request.
        requests: [N] int64, request of each row.
        columns: [N] int64, index of each row in its request's window: 0 is the anchor; depth + 1 in padding.
        input_ids: [N] int64.
        positions: [N] int64.
        slots: [N] int64, K/V slots.
    """

    requests: torch.Tensor
    columns: torch.Tensor
    input_ids: torch.Tensor
    positions: torch.Tensor
    slots: torch.Tensor

    @staticmethod
    def empty(bs: int, num_tokens: int, device: torch.device | str) -> VerifyRows:
        """Return buffers that planning fills."""
        sizes = (bs, bs + 1, *[num_tokens] * 5)
        return VerifyRows(*(torch.empty(size, dtype=torch.int64, device=device) for size in sizes))


def to_device(tensor: torch.Tensor, device: torch.device | str) -> torch.Tensor:
    """Copy ``tensor`` from the CPU to ``device``. A copy from pageable memory would wait for all work queued there."""
    if torch.device(device).type != "cuda":
        return tensor.to(device)
    return tensor.pin_memory().to(device, non_blocking=True)
