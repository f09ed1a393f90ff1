"""Process logits before a token is drawn: penalties, minimum lengths, biases, grammars; and NaN, as SGLang does.

The masks of a grammar come from a walk along the drafts. SGLang's grammar objects stand after the committed tokens, and
the walk returns them there. It ends at the first draft that the grammar forbids: that row gives the draft probability
0, so nothing after it is ever committed. SGLang's own walk takes tensors for single tokens, and twelve times as long or
more.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from http import HTTPStatus
from typing import Any, Self

import numpy as np
import torch
from dspark_kernels import Adjustment, AdjustmentTable, adjust, mask_tokens, to_device
from numpy.typing import NDArray
from sglang.srt.constrained.base_grammar_backend import BaseGrammarObject
from sglang.srt.environ import envs
from sglang.srt.managers.schedule_batch import FINISH_ABORT
from sglang.srt.utils.async_probe import sanitize_nan_logits

from sglang_dspark.engine.batch import CachedByBatch, is_running, prompts_of
from sglang_dspark.engine.part import LogitsPart, StepPart, Worker
from sglang_dspark.engine.sglang_types import Req, ScheduleBatch
from sglang_dspark.step.packed import host_index
from sglang_dspark.step.state import VerifyPlan

MASK_BITS = 32  # of a word of a mask


def grammar_masks(
    reqs: Sequence[Req], windows: Sequence[Sequence[int]], vocab_size: int
) -> tuple[list[int], torch.Tensor | None]:
    """Return the masks of all rows whose request has a grammar.

    A request whose grammar fails is aborted with HTTP 400; what its rows draw no longer matters.

    Args:
        windows: per request the anchor and the drafts under verification, one per row.

    Returns:
        Those rows [m], counted over all windows, and their masks [m, W] int32, bit v set if token v is allowed; rows
        that the walk does not reach are left out. No rows and None if no request has a grammar.
    """
    rows: list[int] = []
    masks: list[torch.Tensor] = []
    start = 0
    for req, window in zip(reqs, windows, strict=True):
        if req.grammar is not None and not req.grammar.finished:
            mask = req.grammar.allocate_vocab_mask(vocab_size, len(window), "cpu")
            try:
                num_reached = _walk(req.grammar, window[1:], mask)
            except ValueError as error:  # llguidance has met a limit, and answers nothing from now on
                reason = str(error).partition("\n")[0]
                req.to_finish = FINISH_ABORT(f"the grammar is too complex: {reason}", HTTPStatus.BAD_REQUEST)
                req.grammar.finished = True  # or SGLang asks it about the token, and takes its error for the reason
                num_reached = 0
            rows.extend(range(start, start + num_reached))
            masks.append(mask[:num_reached])
        start += len(window)
    return rows, torch.cat(masks) if rows else None


def _walk(grammar: BaseGrammarObject, drafts: Sequence[int], mask: torch.Tensor) -> int:
    """Fill the masks [1 + len(drafts), W] of the rows that the grammar reaches, and return how many these are."""
    words = mask.numpy()
    accepted = row = 0
    while not grammar.is_terminated():
        grammar.fill_vocab_mask(mask, row)
        row += 1
        if accepted == len(drafts) or not _allows(words[accepted], drafts[accepted]):
            break
        grammar.accept_token(drafts[accepted])
        accepted += 1
    if accepted:
        grammar.rollback(accepted)
    return row


def _allows(words: NDArray[np.int32], token: int) -> bool:
    """Return whether a mask [W] allows a token; the vocabulary of a model may be larger than its tokenizer's."""
    word, bit = divmod(token, MASK_BITS)
    return word < len(words) and bool(int(words[word]) >> bit & 1)


FIRST_SLOTS = 8  # of the table, which doubles when more requests have adjustments


class Adjustments(LogitsPart):
    """Do to logits what SGLang's sampler does, for rows that know about the drafts before them.

    A request is set up when its prefill draws a token, again after a retraction, and keeps a slot of a table on the
    device from then on; grammars are SGLang's own and live on the host. Steps without such a request pay nothing.

    Args:
        vocab_size: of the target.
        device: of the target.
    """

    def __init__(self, vocab_size: int, device: torch.device) -> None:
        self._vocab_size, self._device = vocab_size, device
        self._table = AdjustmentTable.empty(0, vocab_size, device)
        self._slots: dict[Any, int] = {}
        self._free: list[int] = []
        self._index = CachedByBatch(self._index_of)

    def step_comes(self, batch: ScheduleBatch) -> StepAdjuster | None:
        has_any = batch.has_grammar or self._slots_of(batch.reqs) is not None
        return StepAdjuster(self, batch) if has_any else None

    def first_logits(self, batch: ScheduleBatch, logits: torch.Tensor) -> None:
        """Set up the prompts of a prefill, and adjust the logits of the tokens that it draws."""
        if not (batch.has_grammar or any(map(has_adjustment, batch.reqs))):
            return
        self._index.forget()
        for req in filter(has_adjustment, prompts_of(batch)):
            slot = self._slot_for(req)
            self._table.set(slot, adjustment_of(req, self._vocab_size), list(req.output_ids))
        indptr = torch.arange(len(batch.reqs) + 1, device=self._device)
        requests, anchors = indptr[:-1], torch.zeros_like(indptr[:-1])
        self.adjust(batch.reqs, logits, requests, anchors, anchors, indptr)
        if batch.has_grammar:
            self.mask(batch.reqs, logits, [[0]] * len(batch.reqs))

    def first_tokens(self, batch: ScheduleBatch, tokens: torch.Tensor) -> None:
        self.count(batch.reqs, tokens[:, None])

    def warm_up(self, plan: VerifyPlan, logits: torch.Tensor) -> None:
        table = AdjustmentTable.empty(1, logits.shape[1], logits.device)
        no_slot = host_index([-1], logits.device)
        adjust(logits, table, no_slot, plan.requests, plan.columns, plan.input_ids, plan.indptr)

    def held(self, requests: int) -> AbstractContextManager[object]:
        """Hold the table of all requests: once some have adjustments, every step needs it."""
        slots = max(FIRST_SLOTS, 2 ** (requests - 1).bit_length())
        # It doubles, from one that is copied.
        return nullcontext(AdjustmentTable.empty(slots // 2, self._vocab_size, self._device).grown(slots))

    def count(self, reqs: Sequence[Req], tokens: torch.Tensor) -> None:
        """Count new output tokens [bs, w] int64, -1 after them. No host sync."""
        slots = self._slots_of(reqs)
        if slots is not None:
            self._table.count(slots, tokens)

    def adjust(self, reqs: Sequence[Req], logits: torch.Tensor, *layout: torch.Tensor) -> None:
        """Apply penalties, minimum lengths and biases to logits [N, V] in place; ``layout`` as in the kernel."""
        slots = self._slots_of(reqs)
        if slots is not None:
            adjust(logits, self._table, slots, *layout)

    def mask(self, reqs: Sequence[Req], logits: torch.Tensor, windows: list[list[int]]) -> None:
        """Exclude what grammars forbid from logits [N, V] in place; ``windows``: tokens under verification."""
        rows, bitmask = grammar_masks(reqs, windows, self._vocab_size)
        if bitmask is not None:
            mask_tokens(logits, host_index(rows, self._device), to_device(bitmask, self._device))

    def _slots_of(self, reqs: Sequence[Req]) -> torch.Tensor | None:
        """Return [bs] int64 slots, -1 for requests without one; None if none has one."""
        return self._index.read(reqs) if self._slots else None

    def _index_of(self, reqs: Sequence[Req]) -> torch.Tensor | None:
        self._forget_finished()
        slots = [self._slots.get(req, -1) for req in reqs]
        return host_index(slots, self._device) if max(slots, default=-1) >= 0 else None

    def _slot_for(self, req: Req) -> int:
        if req in self._slots:
            return self._slots[req]
        self._forget_finished()
        if not self._free:
            size = len(self._table)
            self._table = self._table.grown(2 * size or FIRST_SLOTS)
            self._free = list(range(size, len(self._table)))
        slot = self._slots[req] = self._free.pop()
        return slot

    def _forget_finished(self) -> None:
        for req in [req for req in self._slots if not is_running(req)]:
            self._free.append(self._slots.pop(req))


class StepAdjuster(StepPart):
    """Adjust the logits of one decode step."""

    def __init__(self, adjuster: Adjustments, batch: ScheduleBatch) -> None:
        self._adjuster, self._batch = adjuster, batch
        self._windows: list[list[int]] | None = None

    def before_verify(self, plan: VerifyPlan) -> None:
        """Read the tokens under verification if a grammar has to follow them on the host, which waits for them.

        Call it before the target's forward is launched, or the host waits for that as well.
        """
        if self._batch.has_grammar:
            starts, tokens = plan.indptr.tolist(), plan.input_ids.tolist()
            self._windows = [tokens[starts[i] : starts[i + 1]] for i in range(len(self._batch.reqs))]

    def after_verify(self, plan: VerifyPlan, logits: torch.Tensor) -> None:
        reqs = self._batch.reqs
        self._adjuster.adjust(reqs, logits, plan.requests, plan.columns, plan.input_ids, plan.indptr)
        if self._windows is not None:
            self._adjuster.mask(reqs, logits, self._windows)

    def accepted(self, tokens: torch.Tensor) -> None:
        self._adjuster.count(self._batch.reqs, tokens)


def has_adjustment(req: Req) -> bool:
    """Return whether a request has a penalty, a minimum length or a logit bias."""
    parameters = req.sampling_params
    return bool(
        parameters.frequency_penalty
        or parameters.presence_penalty
        or parameters.repetition_penalty != 1.0
        or parameters.min_new_tokens
        or parameters.logit_bias
    )


def adjustment_of(req: Req, vocab_size: int) -> Adjustment:
    """Return a request's penalties, minimum length and biases, as the kernels take them."""
    parameters = req.sampling_params
    stops: set[int | None] = set()
    if parameters.min_new_tokens:
        stops = {
            *(parameters.stop_token_ids or ()),
            *(req.eos_token_ids or ()),
            *(req.tokenizer.additional_stop_token_ids or ()),
            req.tokenizer.eos_token_id,
        }
    return Adjustment(
        frequency=parameters.frequency_penalty,
        presence=parameters.presence_penalty,
        repetition=parameters.repetition_penalty,
        min_new_tokens=parameters.min_new_tokens,
        # A client may name any number as a stop token.
        stop_token_ids=[token for token in stops if token is not None and 0 <= token < vocab_size],
        logit_bias={int(token): bias for token, bias in (parameters.logit_bias or {}).items()},
    )


SWITCHES = (
    envs.SGLANG_SANITIZE_NAN_LOGITS,
    envs.SGLANG_ENABLE_ASYNC_ASSERT,
    envs.SGLANG_ENABLE_NAN_LOGITS_CHECK,
)
"""Switches of SGLang by which its sampler looks for NaN."""


class NanCheck(LogitsPart, StepPart):
    """Looks at all logits before anything else does; itself its part of every step."""

    @classmethod
    def of(cls, worker: Worker) -> Self | None:
        """Return the check; None if no switch asks for it."""
        return cls() if any(switch.get() for switch in SWITCHES) else None

    def first_logits(self, batch: ScheduleBatch, logits: torch.Tensor) -> None:
        sanitize_nan_logits(logits, msg="DSPARK: target logits")

    def step_comes(self, batch: ScheduleBatch) -> Self:
        return self

    def after_verify(self, plan: VerifyPlan, logits: torch.Tensor) -> None:
        sanitize_nan_logits(logits, msg="DSPARK: target logits")
