"""Carry the draft state of requests from one decode step to the next, and reserve their K/V."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from dspark_kernels import to_device
from sglang.srt.mem_cache.allocation import alloc_for_spec_decode
from sglang.srt.mem_cache.allocation_sizing import get_alloc_page_size
from sglang.srt.mem_cache.allocator import BaseTokenToKVPoolAllocator
from sglang.srt.mem_cache.base_prefix_cache import BasePrefixCache
from sglang.srt.plugins.hook_registry import HookType
from sglang.srt.speculative.dflash_info_v2 import DFlashDraftInputV2

from sglang_dspark.engine.hooks import Moment, hook
from sglang_dspark.engine.server import tokens_per_step
from sglang_dspark.engine.sglang_types import Req, ScheduleBatch

STRIDE = 32
"""Tokens that a reservation reaches past what the step needs."""
# Strides of all running requests that have to be free, counting what the prefix cache would give up, before one is
# taken: near the end of the pool they would make others wait, or be retracted.
_SPARE_STRIDES = 4
_PLAIN_ROWS = 1  # the anchor
# Attribute of a request: the most rows of each of its steps whose outcome the host does not know yet, in order.
_UNDER_WAY = "dspark_under_way"


class DSparkDraftInput(DFlashDraftInputV2):
    """Carry what requests bring into their next step, as SGLang's DFLASH does, with a reservation of our own.

    Attributes:
        bonus_tokens: [bs] int64, last committed token: the anchor of the next block. Relayed by SGLang's future map.
        new_seq_lens: [bs] int64, tokens whose K/V is committed; the anchor is not among them.
        nxt_kv_lens_cpu: [bs] int64, upper bound of every request's length in the step ahead; for attention backends
            that plan with host lengths while the real ones are known to the device only.
        room: drafts that each request has slots for; None if these are as many as a step verifies at most.
    """

    room: int | None = None

    def __init__(
        self, bonus_tokens: torch.Tensor, new_seq_lens: torch.Tensor, nxt_kv_lens_cpu: torch.Tensor | None = None
    ) -> None:
        nothing = torch.empty((len(bonus_tokens), 0), device=bonus_tokens.device)  # for fields of other algorithms
        super().__init__(
            topk_p=nothing,
            topk_index=nothing,
            bonus_tokens=bonus_tokens,
            new_seq_lens=new_seq_lens,
            hidden_states=nothing,
            nxt_kv_lens_cpu=nxt_kv_lens_cpu,
        )

    def prepare_for_decode(self, batch: ScheduleBatch) -> None:
        """Reserve K/V slots for the step ahead and enter them in ``req_to_token``."""
        batch.maybe_evict_swa()
        ends, rows = _reserve(batch)
        self.nxt_kv_lens_cpu = torch.tensor(ends)
        # As many for each, also of a request with more slots: what is not accepted holds back slots from the others.
        self.room = None if rows == tokens_per_step() else rows - _PLAIN_ROWS
        for req in batch.reqs:
            req.decode_batch_idx += 1  # only requests that have decoded are asked for what their windows have left
            vars(req).setdefault(_UNDER_WAY, []).append(rows)
        # Committed lengths of the host; under overlap the future map replaces them by the published ones.
        committed = committed_lengths(batch.reqs)
        batch.seq_lens_cpu = torch.tensor(committed)
        batch.seq_lens_sum = sum(committed)


def committed_lengths(reqs: Sequence[Req]) -> list[int]:
    """Return, for every request, the tokens whose K/V is valid as the host knows."""
    return [req.kv.kv_committed_len for req in reqs]


def forget_step(reqs: Sequence[Req]) -> None:
    """Have the first step under way of each request be so no longer: the committed lengths have its outcome."""
    for req in reqs:
        del vars(req)[_UNDER_WAY][0]


def most_rows() -> int:
    """Return the most tokens past what is committed that a request needs slots for.

    Under overlap the committed length lags behind the device by the rows of a step, and the next step has rows of its
    own. Its drafts leave a slot for the anchor of the step after: that one is scheduled before the host knows how many
    of them were accepted, and shall not find a full pool because of those that were not.
    """
    return 2 * tokens_per_step() + _PLAIN_ROWS


@hook(
    "sglang.srt.mem_cache.allocation_sizing.get_req_to_token_extra_context_len",
    HookType.AROUND,
    where="any_worker",
    reason="a step reserves two verify windows past the committed length and a stride, rows of req_to_token may have "
    "room for one window: near the context limit the rest would lie past the end of the row",
    by=Moment.READY,
)
def row_headroom(original: Callable[[], int]) -> int:
    """Return the columns that a row of ``req_to_token`` needs past the context length: what a reservation may reach.

    SGLang's own headroom holds one verify window and four tokens, and two windows only if pages have several tokens.
    """
    return max(original(), most_rows() + STRIDE + get_alloc_page_size() - 1)


@hook(
    "sglang.srt.managers.schedule_batch.ScheduleBatch._new_tokens_required_next_decode_spec_v2",
    HookType.REPLACE,
    where="scheduler",
    reason="SGLang retracts or aborts requests for which two windows do not fit, where a step without drafts does",
)
def slots_required(batch: ScheduleBatch, reqs: Sequence[Req], page_size: int) -> int:
    """Return how many more slots the next step of ``reqs`` takes if it is a plain one."""
    return _missing(reqs, _ends(reqs, _PLAIN_ROWS, page_size), page_size)


@hook(
    "sglang.srt.managers.schedule_batch.ScheduleBatch.check_decode_mem",
    HookType.AROUND,
    where="scheduler",
    reason="slots that running requests keep for drafts go to those that are about to be retracted",
)
def fits(original: Callable[..., bool], batch: ScheduleBatch, selected_indices: Sequence[int] | None = None) -> bool:
    """Return whether a non-speculative step fits, if need be into slots that running requests were given for drafts."""
    if original(batch, selected_indices):
        return True
    _give_back(batch)
    return original(batch, selected_indices)


def _give_back(batch: ScheduleBatch) -> None:
    """Free the slots of every request that a non-speculative step does not need."""
    page = int(batch.token_to_kv_pool_allocator.page_size)
    for req in batch.reqs:
        end = _aligned(_longest(req) + _PLAIN_ROWS, page)
        if end < req.kv.kv_allocated_len:
            batch.tree_cache.free_kv_row(req.kv, [(end, req.kv.kv_allocated_len)])
            req.kv.kv_allocated_len = end


def _reserve(batch: ScheduleBatch) -> tuple[list[int], int]:
    """Give every request of ``batch`` slots for the step ahead, and one more.

    Slots of rejected drafts are used again by the next step. A reservation reaches :data:`STRIDE` tokens further while
    the pool has plenty, so that most steps reserve nothing. If it has too little for whole windows, requests get slots
    for fewer drafts, or for none: those :func:`fits` has found.

    Returns:
        Tokens that each request has slots for, and how many rows of it the step may verify.
    """
    reqs, pool, whole = batch.reqs, batch.token_to_kv_pool_allocator, tokens_per_step() + _PLAIN_ROWS
    page, rows = int(pool.page_size), whole
    ends = _ends(reqs, rows, page)
    allocated = [req.kv.kv_allocated_len for req in reqs]
    if ends == allocated:
        return ends, whole - _PLAIN_ROWS
    if spare_slots(pool, batch.tree_cache) >= (most_rows() + page - 1 + _SPARE_STRIDES * STRIDE) * len(reqs):
        rows += STRIDE
        ends = _ends(reqs, rows, page)
    while rows > _PLAIN_ROWS and not pool.check_decode_capacity(
        num_tokens=_missing(reqs, ends, page), tree_cache=batch.tree_cache
    ):
        rows = min(rows - 1, whole)
        ends = _ends(reqs, rows, page)
    if missing := sum(ends) - sum(allocated):
        begins, reached = (torch.tensor(lengths, dtype=torch.int32) for lengths in (allocated, ends))
        alloc_for_spec_decode(
            batch.tree_cache,
            batch.req_to_token_pool,
            reqs=reqs,
            req_pool_indices=batch.req_pool_indices,
            cur_kv_lens=to_device(begins, batch.device),
            cur_kv_lens_cpu=begins,
            nxt_kv_lens=to_device(reached, batch.device),
            nxt_kv_lens_cpu=reached,
            num_needed_tokens=missing,
            batch=batch,
        )
    return ends, max(_PLAIN_ROWS, min(rows, whole) - _PLAIN_ROWS)


def _longest(req: Req) -> int:
    """Return the most tokens that the steps under way leave a request with."""
    return req.kv.kv_committed_len + sum(vars(req).get(_UNDER_WAY, ()))


def _aligned(length: int, page: int) -> int:
    return -(-length // page) * page


def _ends(reqs: Sequence[Req], rows: int, page: int) -> list[int]:
    """Return how far the slots of each request reach once it has some for ``rows`` more tokens than it may get so far.

    Pages are whole: of one that is not, the rest would be lost.
    """
    return [max(req.kv.kv_allocated_len, _aligned(_longest(req) + rows, page)) for req in reqs]


def _missing(reqs: Sequence[Req], ends: Sequence[int], page: int) -> int:
    """Return how many slots are missing for each request to reach its end."""
    have = (_aligned(req.kv.kv_allocated_len, page) for req in reqs)
    return sum(_aligned(end, page) - length for end, length in zip(ends, have, strict=True))


def spare_slots(pool: BaseTokenToKVPoolAllocator, cache: BasePrefixCache) -> int:
    """Return the slots that are free, or that the prefix cache would give up."""
    if not cache.supports_swa():
        return int(pool.available_size() + cache.evictable_size())
    full = pool.full_available_size() + cache.full_evictable_size()
    return int(min(full, pool.swa_available_size() + cache.swa_evictable_size()))
