"""Adjusts the target's logits before verification: penalties, minimum lengths, biases and the bit masks of grammars.

Row j of a request predicts the token after its output so far and the drafts x_1..x_j. With c(v) occurrences of token v
among those, n their number, and the parameters of the request,

    l(v) <- l(v) - frequency * c(v) - presence * [c(v) > 0]
    l(v) <- -inf                                              where v ends the text and n < min_new_tokens
    l(v) <- l(v) * repetition if l(v) < 0 else l(v) / repetition      where c(v) > 0
    l(v) <- l(v) + bias(v)

in float32 and in this order, which is the one of SGLang's overlap scheduler; its synchronous one applies the first
three in the order of a set. The prompt does not count.

What accumulates lies on the device, one slot per request, so that a step needs nothing from the host but the slots.

Bytes: of an adjusted row the logits, read and written, and 9 * V of its slot; a row without a slot costs neither.

SGLang and xgrammar have kernels for bit masks, too. Ours knows neither and runs anywhere.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields

import torch
import triton
import triton.language as tl

from dspark_kernels.dispatch import on_kernels
from dspark_kernels.preparation import to_device

_TILE = 1024
_FREQUENCY, _PRESENCE, _REPETITION, _MIN_NEW_TOKENS = range(4)


@dataclass(frozen=True)
class Adjustment:
    """The adjustments that one request asks for.

    Attributes:
        frequency: subtracted from a token's logit for each of its occurrences in the output.
        presence: subtracted once if a token occurs.
        repetition: > 0; divides positive logits of tokens that occur and multiplies negative ones.
        min_new_tokens: output tokens before ``stop_token_ids`` are possible.
        stop_token_ids: tokens that end the text.
        logit_bias: added to the logits of these tokens.
    """

    frequency: float = 0.0
    presence: float = 0.0
    repetition: float = 1.0
    min_new_tokens: int = 0
    stop_token_ids: Sequence[int] = ()
    logit_bias: Mapping[int, float] = field(default_factory=dict)


@dataclass(frozen=True)
class AdjustmentTable:
    """Adjustments of the requests that have any, by slot.

    Attributes:
        counts: [S, V] int32, occurrences of each token in the request's output.
        num_outputs: [S] int64, tokens of its output.
        parameters: [S, 4] float32: frequency, presence, repetition, min_new_tokens.
        stops: [S, V] bool, tokens that end its text.
        bias: [S, V] float32.
    """

    counts: torch.Tensor
    num_outputs: torch.Tensor
    parameters: torch.Tensor
    stops: torch.Tensor
    bias: torch.Tensor

    @classmethod
    def empty(cls, num_slots: int, vocab_size: int, device: torch.device | str) -> AdjustmentTable:
        """Return a table of ``num_slots`` slots, none of which is set."""
        return cls(
            counts=torch.zeros((num_slots, vocab_size), dtype=torch.int32, device=device),
            num_outputs=torch.zeros(num_slots, dtype=torch.int64, device=device),
            parameters=torch.zeros((num_slots, 4), device=device),
            stops=torch.zeros((num_slots, vocab_size), dtype=torch.bool, device=device),
            bias=torch.zeros((num_slots, vocab_size), device=device),
        )

    def __len__(self) -> int:
        return self.num_outputs.shape[0]

    def grown(self, num_slots: int) -> AdjustmentTable:
        """Return a larger table that starts with the slots of this one."""
        larger = AdjustmentTable.empty(num_slots, self.counts.shape[1], self.counts.device)
        for part in fields(self):
            getattr(larger, part.name)[: len(self)] = getattr(self, part.name)
        return larger

    def set(self, slot: int, adjustment: Adjustment, output_ids: Sequence[int]) -> None:
        """Let ``slot`` be that of a request with this output. Copies to the device without waiting."""
        for part in (self.counts, self.stops, self.bias):
            part[slot].zero_()
        self.num_outputs[slot].fill_(len(output_ids))  # an assignment to one element would copy, and wait
        self.parameters[slot] = self._on_device(
            [adjustment.frequency, adjustment.presence, adjustment.repetition, float(adjustment.min_new_tokens)]
        )
        if output_ids:
            tokens = self._on_device(output_ids)
            self.counts[slot].index_add_(0, tokens, torch.ones_like(tokens, dtype=torch.int32))
        if adjustment.stop_token_ids:
            self.stops[slot].index_fill_(0, self._on_device(list(adjustment.stop_token_ids)), True)
        if adjustment.logit_bias:
            tokens = self._on_device(list(adjustment.logit_bias))
            self.bias[slot].index_copy_(0, tokens, self._on_device([float(v) for v in adjustment.logit_bias.values()]))

    def _on_device(self, values: Sequence[int] | Sequence[float]) -> torch.Tensor:
        return to_device(torch.tensor(values), self.counts.device)

    def count(self, slots: torch.Tensor, tokens: torch.Tensor) -> None:
        """Add new output. No host sync.

        Args:
            slots: [bs] int64, no slot twice; -1 for requests without one.
            tokens: [bs, w] int64, new tokens of each request, -1 after them.
        """
        is_new = (tokens >= 0) & (slots >= 0)[:, None]
        owners = slots.clamp_min(0)
        entries = owners[:, None] * self.counts.shape[1] + tokens.clamp_min(0)
        self.counts.view(-1).scatter_add_(0, entries.view(-1), is_new.view(-1).to(torch.int32))
        self.num_outputs.scatter_add_(0, owners, is_new.sum(-1))


def adjust_ref(
    logits: torch.Tensor,  # [N, V]
    table: AdjustmentTable,
    slots: torch.Tensor,  # [bs] int64
    requests: torch.Tensor,  # [N] int64
    columns: torch.Tensor,  # [N] int64
    input_ids: torch.Tensor,  # [N] int64
    indptr: torch.Tensor,  # [bs + 1] int64
) -> None:
    """Compute the same as :func:`adjust` in plain torch; finds the rows to adjust on the host."""
    bs, vocab_size = slots.shape[0], logits.shape[1]
    is_row = torch.arange(logits.shape[0], device=logits.device) < indptr[bs]
    row_slots = torch.where(is_row, slots[requests.clamp_max(bs - 1)], -1)
    rows = (row_slots >= 0).nonzero().squeeze(1)
    owners, offsets = row_slots[rows], columns[rows]
    counts = table.counts[owners]
    for i in range(int(offsets.max()) if rows.shape[0] else 0):
        has_draft = i < offsets
        drafts = input_ids[(rows - i).clamp_min(0)] * has_draft
        counts.scatter_add_(1, drafts[:, None], has_draft[:, None].to(counts.dtype))
    parameters = table.parameters[owners].T[..., None]  # [4, rows, 1]
    occurs = counts > 0
    adjusted = logits[rows].float() - (parameters[_FREQUENCY] * counts + parameters[_PRESENCE] * occurs)
    too_short = table.num_outputs[owners] + offsets < table.parameters[owners, _MIN_NEW_TOKENS]
    adjusted.masked_fill_(table.stops[owners] & too_short[:, None], -torch.inf)
    scale = torch.where(occurs, parameters[_REPETITION].expand(-1, vocab_size), 1.0)
    adjusted = torch.where(adjusted < 0, adjusted * scale, adjusted / scale) + table.bias[owners]
    logits[rows] = adjusted.to(logits.dtype)


# Batch sizes change from step to step; specialising on them would compile the kernel again and again.
@triton.jit(do_not_specialize=["bs"])
def _adjust_kernel(
    logits_ptr,
    counts_ptr,
    num_outputs_ptr,
    parameters_ptr,
    stops_ptr,
    bias_ptr,
    slots_ptr,
    requests_ptr,
    columns_ptr,
    input_ids_ptr,
    indptr_ptr,
    bs,
    vocab_size,
    logits_stride,
    TILE: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    if row >= tl.load(indptr_ptr + bs):
        return
    slot = tl.load(slots_ptr + tl.load(requests_ptr + row))
    if slot < 0:
        return
    column = tl.load(columns_ptr + row).to(tl.int32)
    tokens = tl.program_id(1) * TILE + tl.arange(0, TILE)
    mask = tokens < vocab_size
    entry = slot * vocab_size + tokens
    count = tl.load(counts_ptr + entry, mask=mask, other=0)
    for i in range(column):
        count += (tokens == tl.load(input_ids_ptr + row - i)).to(tl.int32)
    occurs = count > 0
    frequency = tl.load(parameters_ptr + slot * 4)
    presence = tl.load(parameters_ptr + slot * 4 + 1)
    repetition = tl.load(parameters_ptr + slot * 4 + 2)
    min_new_tokens = tl.load(parameters_ptr + slot * 4 + 3)
    too_short = (tl.load(num_outputs_ptr + slot) + column).to(tl.float32) < min_new_tokens
    stops = tl.load(stops_ptr + entry, mask=mask, other=0) != 0
    bias = tl.load(bias_ptr + entry, mask=mask, other=0.0)

    pointers = logits_ptr + row * logits_stride + tokens
    given = tl.load(pointers, mask=mask, other=0.0)
    logit = given.to(tl.float32) - (frequency * count.to(tl.float32) + tl.where(occurs, presence, 0.0))
    logit = tl.where(stops, tl.where(too_short, float("-inf"), logit), logit)
    scale = tl.where(occurs, repetition, 1.0)
    logit = tl.where(logit < 0, logit * scale, tl.div_rn(logit, scale)) + bias
    tl.store(pointers, logit.to(given.dtype), mask=mask)


@on_kernels(adjust_ref)
def adjust(
    logits: torch.Tensor,  # [N, V]
    table: AdjustmentTable,
    slots: torch.Tensor,  # [bs] int64
    requests: torch.Tensor,  # [N] int64
    columns: torch.Tensor,  # [N] int64
    input_ids: torch.Tensor,  # [N] int64
    indptr: torch.Tensor,  # [bs + 1] int64
) -> None:
    """Adjust the rows of a verification in place. No host sync on CUDA.

    Args:
        logits: float32, float16 or bfloat16, elements of a row contiguous.
        table: adjustments by slot; outputs up to the anchors included.
        slots: slot of each request, -1 for requests whose rows stay as they are.
        requests: request of each row.
        columns: index of each row in its request's window; 0 is the anchor.
        input_ids: the tokens verified, window by window: x_j stands in the row of column j.
        indptr: first row of each request; rows from ``indptr[bs]`` on are padding and stay as they are.
    """
    num_rows, vocab_size = logits.shape
    _adjust_kernel[(num_rows, triton.cdiv(vocab_size, _TILE))](
        logits,
        table.counts,
        table.num_outputs,
        table.parameters,
        table.stops.view(torch.uint8),
        table.bias,
        slots,
        requests,
        columns,
        input_ids,
        indptr,
        slots.shape[0],
        vocab_size,
        logits.stride(0),
        TILE=_TILE,
    )


_BITS = 32


def mask_tokens(
    logits: torch.Tensor,  # [N, V]
    rows: torch.Tensor,  # [m] int64
    bitmask: torch.Tensor,  # [m, W] int32
) -> None:
    """Set the logits of forbidden tokens to -inf, in place. No host sync.

    Args:
        logits: any float dtype.
        rows: rows to mask, none twice.
        bitmask: token v is allowed in row ``rows[i]`` when bit ``v % 32`` of ``bitmask[i, v // 32]`` is set; tokens
            without a bit are forbidden.
    """
    bits = torch.arange(_BITS, dtype=torch.int32, device=bitmask.device)
    allowed = ((bitmask[..., None] >> bits) & 1).flatten(1)[:, : logits.shape[1]] != 0
    missing = logits.shape[1] - allowed.shape[1]
    allowed = torch.nn.functional.pad(allowed, (0, missing)) if missing else allowed
    logits[rows] = logits[rows].masked_fill(~allowed, -torch.inf)
