"""Per-request draft state that SGLang carries from one decode step to the next, and its K/V reservation."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import torch
from dspark_kernels import to_device
from sglang.srt.mem_cache.allocation import alloc_token_slots
from sglang.srt.speculative.spec_info import SpecInput, SpecInputType

from sglang_dspark.engine.compat.arguments import tokens_per_step

Lengths = np.ndarray[Any, np.dtype[np.int64]]

STRIDE = 32
"""Tokens that a reservation reaches past what the step needs."""
# Strides of all running requests that have to be free, counting what the prefix cache would give up, before one is
# taken: near the end of the pool they would make others wait, or be retracted.
_SPARE_STRIDES = 4


@dataclass
class DSparkDraftInput(SpecInput):
    """What a request brings into its next step.

    Attributes:
        bonus_tokens: [bs] int64, last committed token: the anchor of the next block. Relayed by SGLang's future map.
        new_seq_lens: [bs] int64, tokens whose K/V is committed; the anchor is not among them.
        future_indices: [bs], set by the scheduler under overlap.
        reserved_lens: upper bound of every request's length in the step ahead; for attention backends that plan with
            host lengths while the real ones are known to the device only.
        topk_p, topk_index, hidden_states: the relay reads these of every algorithm; DSPARK has none.
    """

    num_tokens_per_req: ClassVar[int] = 1  # of a decode batch that is padded
    num_tokens_for_logprob_per_req: ClassVar[int] = 1

    bonus_tokens: torch.Tensor
    new_seq_lens: torch.Tensor
    future_indices: torch.Tensor | None = None
    reserved_lens: Sequence[int] = ()
    topk_p: torch.Tensor | None = None
    topk_index: torch.Tensor | None = None
    hidden_states: torch.Tensor | None = None

    def __post_init__(self) -> None:
        super().__init__(spec_input_type=SpecInputType.DFLASH_DRAFT)

    @classmethod
    def idle(cls, device: Any) -> DSparkDraftInput:
        """State of a batch without requests."""
        empty = torch.empty((0,), dtype=torch.int64, device=device)
        return cls(bonus_tokens=empty, new_seq_lens=empty)

    def prepare_for_decode(self, batch: Any) -> None:
        """Reserve K/V slots for the step ahead and enter them in ``req_to_token``.

        Two verify windows past the committed length: under overlap that length lags behind the device by up to one
        window, and the step needs one of its own. Slots of rejected drafts are used again by the next step. What is
        reserved reaches :data:`STRIDE` tokens further while the pool has plenty, so that most steps reserve nothing,
        and to the end of a page.
        """
        reqs = batch.reqs
        if not reqs:
            return
        needed = 2 * tokens_per_step()
        committed, allocated = kv_lengths(reqs)
        short = [place for place, length in enumerate(committed) if allocated[place] < length + needed]
        if short:
            _reserve(batch, [reqs[place] for place in short], needed)
            _, allocated = kv_lengths(reqs)
        self.reserved_lens = allocated
        # Committed lengths of the host; under overlap the future map replaces them by the published ones.
        batch.seq_lens_cpu = torch.tensor(committed)
        batch.seq_lens_sum = sum(committed)

    def filter_batch(self, new_indices: torch.Tensor, **_unused: Any) -> None:
        """Keep the requests at ``new_indices``."""
        if self.future_indices is not None:
            self.future_indices = self.future_indices[new_indices]
        else:
            self.bonus_tokens = self.bonus_tokens[new_indices]
            self.new_seq_lens = self.new_seq_lens[new_indices]

    def merge_batch(self, other: DSparkDraftInput) -> None:
        """Append the requests of ``other``."""
        if self.future_indices is not None:
            assert other.future_indices is not None, "batches of one server are either all ahead of the device or none"
            self.future_indices = torch.cat([self.future_indices, other.future_indices])
        else:
            self.bonus_tokens = torch.cat([self.bonus_tokens, other.bonus_tokens])
            self.new_seq_lens = torch.cat([self.new_seq_lens, other.new_seq_lens])


def kv_lengths(reqs: Sequence[Any]) -> tuple[list[int], list[int]]:
    """Tokens whose K/V is valid as the host knows, and tokens that slots are reserved for: of every request."""
    records = [req.kv for req in reqs]
    return [record.kv_committed_len for record in records], [record.kv_allocated_len for record in records]


def _reserve(batch: Any, short: Sequence[Any], needed: int) -> None:
    """Give the requests ``short`` of ``batch`` slots for ``needed`` tokens past what they have committed, or more."""
    pool, tree_cache = batch.token_to_kv_pool_allocator, batch.tree_cache
    spare = pool.available_size() + tree_cache.evictable_size()
    page = int(pool.page_size)
    stride = STRIDE if spare >= (needed + page - 1 + _SPARE_STRIDES * STRIDE) * len(batch.reqs) else 0
    committed, allocated = (np.array(found, dtype=np.int64) for found in kv_lengths(short))
    rows, table = np.array([req.kv.req_pool_idx for req in short]), batch.req_to_token_pool.req_to_token
    # The pages that hold the last tokens of a prompt are the request's in full.
    owned = _whole_pages(allocated, page)
    if (owned > allocated).any():
        where, places = _cells(rows, allocated, owned, table.device)
        last = to_device(torch.from_numpy(np.repeat(allocated - 1, owned - allocated)), table.device)
        table[where[0], where[1]] = table[where[0], last] + (1 + places).to(table.dtype)
    reserved = _whole_pages(committed + needed + stride, page)
    where, _ = _cells(rows, owned, reserved, table.device)
    table[where[0], where[1]] = alloc_token_slots(tree_cache, where.shape[1]).to(table.dtype)
    for req, length in zip(short, reserved.tolist(), strict=True):
        req.kv.kv_allocated_len = length  # the one place that writes it: elsewhere the slots would leak


def _whole_pages(lengths: Lengths, page: int) -> Lengths:
    return -(-lengths // page) * page


def _cells(rows: Lengths, begins: Lengths, ends: Lengths, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """Cells of ``req_to_token``: in row ``rows[i]``, the columns ``begins[i]..ends[i]-1``.

    Returns:
        [2, n] int64 rows and columns, and [n] int64 the place of each among those of its row.
    """
    counts = ends - begins
    starts = np.repeat(np.cumsum(counts) - counts, counts)
    places = np.arange(len(starts)) - starts
    cells = np.stack([np.repeat(rows, counts), np.repeat(begins, counts) + places, places])
    moved = to_device(torch.from_numpy(cells), device)
    return moved[:2], moved[2]
