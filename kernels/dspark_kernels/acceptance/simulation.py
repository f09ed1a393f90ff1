"""Random acceptance: what verification would keep of a drafter that this one stands in for.

A model with random weights has the step times of its shape, and its drafts are never accepted. Here a draft is kept as
a number that follows from the key of its request and its position in the text, whichever engine asks and whatever it
verified before. So engines that verify whole blocks commit the same tokens in the same steps, and a draft that was not
verified finds the same luck when it is drafted again.

The probability of keeping it says how hard a position is: in half of the cases its quantile is that of ``SPAN``
positions. The logit of that probability stands in for the confidence head's, which then knows what it says.

Bytes: per request 16 + 4 gamma read of the tables, 16 gamma + 40 read and written: the launch is the cost.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from dspark_kernels.acceptance.acceptance_reference import AcceptResult
from dspark_kernels.dispatch import on_kernels
from dspark_kernels.noise import Purpose, philox4x32

SPAN = 16
"""Positions of a text that may share their difficulty."""
QUANTILES = 256
"""Entries of the distribution for each slot of a block: probabilities at evenly spaced quantiles."""

_EDGE = 1e-4  # probabilities of 0 and 1 have no logit
_WORD = int(Purpose.SIMULATED) << 16
_MASK32 = 0xFFFFFFFF
# The same for kernels.
_SPAN, _QUANTILES = tl.constexpr(SPAN), tl.constexpr(QUANTILES)
_LEAST, _PURPOSE = tl.constexpr(_EDGE), tl.constexpr(_WORD)


@dataclass(frozen=True)
class SimulatedDraws:
    """Decide which drafts are kept.

    Attributes:
        keys: [rows] int64 in [0, 2**32), of the running requests by their rows of ``req_to_token``.
        quantiles: [gamma, QUANTILES] float32 probabilities by slot, ascending.
    """

    keys: torch.Tensor
    quantiles: torch.Tensor


def _drawn(
    draws: SimulatedDraws, rows: torch.Tensor, prefix_lens: torch.Tensor, gamma: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return [bs, gamma] float32 probabilities of keeping each draft, and whether it is kept."""
    slots = torch.arange(gamma, device=rows.device)
    positions, keys = prefix_lens[:, None].long() + 1 + slots, draws.keys[rows][:, None]
    own, choice, luck, _ = philox4x32((_WORD, positions & _MASK32, 0, 0), (keys, 0))
    shared, *_ = philox4x32((_WORD, positions // SPAN, 1, 0), (keys, 0))
    quantiles = torch.where(choice >> 31 == 1, shared, own)
    probabilities = draws.quantiles[slots, quantiles * QUANTILES >> 32]
    return probabilities, (luck >> 8).float() * 2.0**-24 < probabilities


def simulated_confidence_ref(
    draws: SimulatedDraws, rows: torch.Tensor, prefix_lens: torch.Tensor, gamma: int
) -> torch.Tensor:
    """Compute the same as :func:`simulated_confidence` in plain torch. No host sync."""
    return _drawn(draws, rows, prefix_lens, gamma)[0].clamp(_EDGE, 1 - _EDGE).logit()


def simulated_accept_ref(
    draws: SimulatedDraws,
    rows: torch.Tensor,
    prefix_lens: torch.Tensor,
    draft_tokens: torch.Tensor,
    bonus_tokens: torch.Tensor,
    verify_lens: torch.Tensor | None = None,
) -> AcceptResult:
    """Compute the same as :func:`simulated_accept` in plain torch. No host sync."""
    gamma = draft_tokens.shape[1]
    kept = _drawn(draws, rows, prefix_lens, gamma)[1]
    slots = torch.arange(gamma + 1, device=rows.device)
    if verify_lens is not None:
        kept &= slots[:-1] < verify_lens[:, None]
    lens, bonus = kept.long().cumprod(-1).sum(-1), bonus_tokens.long()
    drafts = torch.nn.functional.pad(draft_tokens.long(), (0, 1))
    out_tokens = torch.where(slots < lens[:, None], drafts, -1)
    out_tokens = torch.where(slots == lens[:, None], bonus[:, None], out_tokens)
    return AcceptResult(lens, bonus, out_tokens, prefix_lens.long() + lens + 1)


@triton.jit
def _draw(keys_ptr, quantiles_ptr, row, prefix_len, slots, gamma) -> tuple[tl.tensor, tl.tensor]:
    """``_drawn`` of one request; nothing is kept from ``gamma`` on."""
    key = tl.load(keys_ptr + row)
    zeros = (slots * 0).to(tl.uint32)
    positions = prefix_len + 1 + slots
    own, choice, luck, _ = tl.philox(key, zeros + _PURPOSE, positions.to(tl.uint32), zeros, zeros)
    shared, _a, _b, _c = tl.philox(key, zeros + _PURPOSE, (positions // _SPAN).to(tl.uint32), zeros + 1, zeros)
    quantiles = tl.where((choice >> 31) == 1, shared, own).to(tl.int64) * _QUANTILES >> 32
    probabilities = tl.load(quantiles_ptr + slots * _QUANTILES + quantiles, mask=slots < gamma, other=0.0)
    return probabilities, (luck >> 8).to(tl.float32) * (2.0**-24) < probabilities


@triton.jit(do_not_specialize=["gamma"])
def _simulated_confidence_kernel(
    keys_ptr,
    quantiles_ptr,
    rows_ptr,
    prefix_lens_ptr,
    out_ptr,
    gamma,
    SLOTS: tl.constexpr,
):
    request, slots = tl.program_id(0), tl.arange(0, SLOTS)
    row, prefix_len = tl.load(rows_ptr + request).to(tl.int64), tl.load(prefix_lens_ptr + request).to(tl.int64)
    probabilities, _kept = _draw(keys_ptr, quantiles_ptr, row, prefix_len, slots, gamma)
    inside = tl.minimum(tl.maximum(probabilities, _LEAST), 1.0 - _LEAST)
    tl.store(out_ptr + request * gamma + slots, tl.log(inside) - tl.log(1.0 - inside), mask=slots < gamma)


@triton.jit(do_not_specialize=["gamma", "drafts_stride"])
def _simulated_accept_kernel(
    keys_ptr,
    quantiles_ptr,
    rows_ptr,
    prefix_lens_ptr,
    drafts_ptr,
    drafts_stride,
    bonus_ptr,
    verify_lens_ptr,
    lens_ptr,
    out_bonus_ptr,
    out_tokens_ptr,
    new_lens_ptr,
    gamma,
    SLOTS: tl.constexpr,
):
    request, slots = tl.program_id(0), tl.arange(0, SLOTS)
    row, prefix_len = tl.load(rows_ptr + request).to(tl.int64), tl.load(prefix_lens_ptr + request).to(tl.int64)
    _probabilities, kept = _draw(keys_ptr, quantiles_ptr, row, prefix_len, slots, gamma)
    if verify_lens_ptr is not None:
        kept = kept & (slots < tl.load(verify_lens_ptr + request))
    length = tl.min(tl.where(kept, SLOTS, slots), axis=0).to(tl.int64)
    bonus = tl.load(bonus_ptr + request).to(tl.int64)
    drafts = tl.load(drafts_ptr + request * drafts_stride + slots, mask=slots < gamma, other=0).to(tl.int64)
    tokens = tl.where(slots < length, drafts, tl.where(slots == length, bonus, -1))
    tl.store(out_tokens_ptr + request * (gamma + 1) + slots, tokens, mask=slots <= gamma)
    tl.store(lens_ptr + request, length)
    tl.store(out_bonus_ptr + request, bonus)
    tl.store(new_lens_ptr + request, prefix_len + length + 1)


@on_kernels(simulated_confidence_ref)
def simulated_confidence(
    draws: SimulatedDraws, rows: torch.Tensor, prefix_lens: torch.Tensor, gamma: int
) -> torch.Tensor:
    """Return [bs, gamma] float32 logits of the probabilities by which drafts are kept. Safe under graph capture.

    Args:
        rows: [bs] int, of the requests' keys.
        prefix_lens: [bs] int, position of the anchor; the drafts follow it.
        gamma: drafts of a block.
    """
    out = torch.empty((len(rows), gamma), dtype=torch.float32, device=rows.device)
    _simulated_confidence_kernel[(len(rows),)](
        draws.keys, draws.quantiles, rows, prefix_lens, out, gamma, _slots(draws)
    )
    return out


@on_kernels(simulated_accept_ref)
def simulated_accept(
    draws: SimulatedDraws,
    rows: torch.Tensor,
    prefix_lens: torch.Tensor,
    draft_tokens: torch.Tensor,
    bonus_tokens: torch.Tensor,
    verify_lens: torch.Tensor | None = None,
) -> AcceptResult:
    """Keep drafts at random, in place of what was judged. Safe under graph capture, no host sync.

    Args:
        rows, prefix_lens: see :func:`simulated_confidence`.
        draft_tokens: [bs, gamma] int, the proposals; gamma = 0 is a non-speculative step.
        bonus_tokens: [bs] int, which verification drew; they stay, wherever they then stand.
        verify_lens: [bs] int, drafts under verification, 0..gamma; None for all.
    """
    bs, gamma = draft_tokens.shape
    lens, bonus, new_lens = (torch.empty(bs, dtype=torch.int64, device=rows.device) for _ in range(3))
    out_tokens = torch.empty((bs, gamma + 1), dtype=torch.int64, device=rows.device)
    _simulated_accept_kernel[(bs,)](
        draws.keys,
        draws.quantiles,
        rows,
        prefix_lens,
        draft_tokens,
        draft_tokens.stride(0),
        bonus_tokens,
        verify_lens,
        lens,
        bonus,
        out_tokens,
        new_lens,
        gamma,
        _slots(draws),
    )
    return AcceptResult(lens, bonus, out_tokens, new_lens)


def _slots(draws: SimulatedDraws) -> int:
    """Return slots of a program, the same for shorter drafts: no depth compiles another kernel."""
    return triton.next_power_of_2(len(draws.quantiles) + 1)
