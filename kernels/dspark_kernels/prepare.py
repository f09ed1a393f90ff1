"""What a decode step starts from, in one launch: draft blocks, their positions and the K/V slots of the window.

The outputs may be longer than the batch: a CUDA graph is captured for a number of request slots, and the step's
requests are staged into its buffers. What stands behind them is padding that is safe to compute with: context length 0,
row 0 of the slot table, K/V slot 0, a block of masks.

Bytes: per request slot 8 * (2 gamma + window + 4) written and 24 + 4 window read. That is 0.07 MB for 256 requests with
gamma 7: the launch is the cost.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

_REQUESTS_PER_PROGRAM = 16


@dataclass(frozen=True)
class StepRequests:
    """The requests of a decode step, as the engine hands them over.

    Attributes:
        anchors: [bs] int, last committed token.
        prefix_lens: [bs] int, tokens whose K/V is committed; the anchor's position.
        req_pool_indices: [bs] int, rows of ``req_to_token``.
        req_to_token: [rows, columns] int, K/V slot of every position of every request; columns are contiguous.
        num_requests: [1] int64 on the device, or None where all of them are real. Requests from there on are padding.
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
        positions: [S, gamma + 1] int64, prefix_lens + 0..gamma.
        window_slots: [S, window] int64, K/V slots of the first of these positions.
        anchors, prefix_lens, req_pool_indices: [S] int64; 0 behind the requests.
        num_requests: [1] int64, bs.
    """

    block_ids: torch.Tensor
    positions: torch.Tensor
    window_slots: torch.Tensor
    anchors: torch.Tensor
    prefix_lens: torch.Tensor
    req_pool_indices: torch.Tensor
    num_requests: torch.Tensor

    @classmethod
    def empty(cls, num_slots: int, gamma: int, window: int, device: torch.device | str) -> PreparedStep:
        """Buffers that :func:`prepare` fills."""

        def int64(*shape: int) -> torch.Tensor:
            return torch.empty(shape, dtype=torch.int64, device=device)

        return cls(
            block_ids=int64(num_slots, gamma),
            positions=int64(num_slots, gamma + 1),
            window_slots=int64(num_slots, window),
            anchors=int64(num_slots),
            prefix_lens=int64(num_slots),
            req_pool_indices=int64(num_slots),
            num_requests=int64(1),
        )

    def requests(self, req_to_token: torch.Tensor, num_slots: int | None = None) -> StepRequests:
        """The same requests as the input of what follows, in the first ``num_slots`` slots; None takes all."""
        return StepRequests(
            self.anchors[:num_slots],
            self.prefix_lens[:num_slots],
            self.req_pool_indices[:num_slots],
            req_to_token,
            self.num_requests,
        )


def prepare_ref(
    requests: StepRequests, gamma: int, window: int, mask_token_id: int, out: PreparedStep | None = None
) -> PreparedStep:
    """The same as :func:`prepare` in plain torch. No host sync."""
    bs, device = len(requests), requests.anchors.device
    out = PreparedStep.empty(bs, gamma, window, device) if out is None else out
    for column in (out.anchors, out.prefix_lens, out.req_pool_indices):
        column[bs:] = 0
    out.anchors[:bs] = requests.anchors
    out.prefix_lens[:bs] = requests.prefix_lens
    out.req_pool_indices[:bs] = requests.req_pool_indices
    out.num_requests.fill_(bs)

    out.block_ids.fill_(mask_token_id)
    out.block_ids[:bs, 0] = requests.anchors
    torch.add(out.prefix_lens[:, None], torch.arange(gamma + 1, device=device), out=out.positions)
    out.window_slots[bs:] = 0
    rows = out.req_pool_indices[:bs, None]
    out.window_slots[:bs] = requests.req_to_token[rows, out.positions[:bs, :window]].to(torch.int64)
    return out


# Batch sizes change all the time; specialising on them would compile the kernel again and again.
@triton.jit(do_not_specialize=["bs", "num_slots", "mask_token_id"])
def _prepare_kernel(
    anchors_ptr,
    prefix_lens_ptr,
    req_pool_indices_ptr,
    req_to_token_ptr,
    block_ids_ptr,
    positions_ptr,
    window_slots_ptr,
    out_anchors_ptr,
    out_prefix_lens_ptr,
    out_req_pool_indices_ptr,
    num_requests_ptr,
    table_stride,
    bs,
    num_slots,
    mask_token_id,
    GAMMA: tl.constexpr,
    WINDOW: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_C: tl.constexpr,  # >= GAMMA + 1 and WINDOW
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
    # Every program writes the same number: cheaper than finding out which one should.
    tl.store(num_requests_ptr, bs.to(tl.int64))

    columns = tl.arange(0, BLOCK_C)
    positions = prefix_lens[:, None] + columns[None, :]
    slots = tl.load(
        req_to_token_ptr + table_rows[:, None] * table_stride + positions,
        mask=real[:, None] & (columns < WINDOW)[None, :],
        other=0,
    ).to(tl.int64)
    is_anchor = real[:, None] & (columns == 0)[None, :]
    ids = tl.where(is_anchor, anchors[:, None], mask_token_id)
    rows = requests[:, None].to(tl.int64)
    tl.store(block_ids_ptr + rows * GAMMA + columns[None, :], ids, mask=in_slots[:, None] & (columns < GAMMA)[None, :])
    tl.store(
        positions_ptr + rows * (GAMMA + 1) + columns[None, :],
        positions,
        mask=in_slots[:, None] & (columns <= GAMMA)[None, :],
    )
    tl.store(
        window_slots_ptr + rows * WINDOW + columns[None, :], slots, mask=in_slots[:, None] & (columns < WINDOW)[None, :]
    )


def prepare(
    requests: StepRequests, gamma: int, window: int, mask_token_id: int, out: PreparedStep | None = None
) -> PreparedStep:
    """Lay out the step. No host sync; safe under graph capture.

    Args:
        requests: all real: their number is known to the host, which launches for them.
        gamma: slots of a draft block.
        window: K/V slots to look up per request, at most gamma + 1: the anchor's and those of the drafts that may be
            verified. ``req_to_token`` must hold them.
        out: buffers of at least bs request slots, as a captured graph has them; new ones by default.

    Raises:
        ValueError: buffers of another shape, or a window wider than the block's positions.
    """
    bs, device = len(requests), requests.anchors.device
    if not 1 <= window <= gamma + 1:
        raise ValueError(f"window={window} where a block of {gamma} has positions for 1..{gamma + 1}")
    out = PreparedStep.empty(bs, gamma, window, device) if out is None else out
    num_slots = out.anchors.shape[0]
    if num_slots < bs or out.block_ids.shape[1] != gamma or out.window_slots.shape[1] != window:
        raise ValueError(
            f"out has {num_slots} request slots, gamma {out.block_ids.shape[1]} and window "
            f"{out.window_slots.shape[1]} where {bs} requests, gamma {gamma} and window {window} are to be staged"
        )
    _prepare_kernel[(max(1, triton.cdiv(num_slots, _REQUESTS_PER_PROGRAM)),)](
        requests.anchors,
        requests.prefix_lens,
        requests.req_pool_indices,
        requests.req_to_token,
        out.block_ids,
        out.positions,
        out.window_slots,
        out.anchors,
        out.prefix_lens,
        out.req_pool_indices,
        out.num_requests,
        requests.req_to_token.stride(0),
        bs,
        num_slots,
        mask_token_id,
        GAMMA=gamma,
        WINDOW=window,
        BLOCK_R=_REQUESTS_PER_PROGRAM,
        BLOCK_C=triton.next_power_of_2(gamma + 1),
        num_warps=1,
    )
    return out
