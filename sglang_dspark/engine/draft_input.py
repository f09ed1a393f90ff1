"""Carry the draft state of requests from one decode step to the next, and reserve their K/V."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from dspark_kernels import to_device
from sglang.srt.mem_cache.allocation import alloc_for_spec_decode
from sglang.srt.mem_cache.allocation_sizing import get_alloc_page_size, page_aligned_decode_alloc_lens
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


class DSparkDraftInput(DFlashDraftInputV2):
    """Carry what requests bring into their next step, as SGLang's DFLASH does, with a reservation of our own.

    Attributes:
        bonus_tokens: [bs] int64, last committed token: the anchor of the next block. Relayed by SGLang's future map.
        new_seq_lens: [bs] int64, tokens whose K/V is committed; the anchor is not among them.
        nxt_kv_lens_cpu: [bs] int64, upper bound of every request's length in the step ahead; for attention backends
            that plan with host lengths while the real ones are known to the device only.
    """

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
        self.nxt_kv_lens_cpu = torch.tensor(_reserve(batch))
        for req in batch.reqs:
            req.decode_batch_idx += 1  # only requests that have decoded are asked for what their windows have left
        # Committed lengths of the host; under overlap the future map replaces them by the published ones.
        committed = committed_lengths(batch.reqs)
        batch.seq_lens_cpu = torch.tensor(committed)
        batch.seq_lens_sum = sum(committed)


def committed_lengths(reqs: Sequence[Req]) -> list[int]:
    """Return, for every request, the tokens whose K/V is valid as the host knows."""
    return [req.kv.kv_committed_len for req in reqs]


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

    SGLang's own headroom holds one verify window, and two only if pages have several tokens.
    """
    return original() + tokens_per_step() + STRIDE + get_alloc_page_size() - 1


def _reserve(batch: ScheduleBatch) -> list[int]:
    """Give every request of ``batch`` slots for two verify windows past its committed length, or more.

    Under overlap the committed length lags behind the device by up to one window, and the step needs one of its own.
    Slots of rejected drafts are used again by the next step. A reservation reaches :data:`STRIDE` tokens further while
    the pool has plenty, so that most steps reserve nothing.

    Returns:
        Tokens that each request has slots for.
    """
    reqs, pool, needed = batch.reqs, batch.token_to_kv_pool_allocator, 2 * tokens_per_step()
    page = int(pool.page_size)
    allocated, reserved, missing = page_aligned_decode_alloc_lens(reqs, reserve=needed, page_size=page)
    if not missing:
        return allocated
    if spare_slots(pool, batch.tree_cache) >= (needed + page - 1 + _SPARE_STRIDES * STRIDE) * len(reqs):
        allocated, reserved, missing = page_aligned_decode_alloc_lens(reqs, reserve=needed + STRIDE, page_size=page)
    begins, ends = (torch.tensor(lengths, dtype=torch.int32) for lengths in (allocated, reserved))
    alloc_for_spec_decode(
        batch.tree_cache,
        batch.req_to_token_pool,
        reqs=reqs,
        req_pool_indices=batch.req_pool_indices,
        cur_kv_lens=to_device(begins, batch.device),
        cur_kv_lens_cpu=begins,
        nxt_kv_lens=to_device(ends, batch.device),
        nxt_kv_lens_cpu=ends,
        num_needed_tokens=missing,
        batch=batch,
    )
    return reserved


def spare_slots(pool: BaseTokenToKVPoolAllocator, cache: BasePrefixCache) -> int:
    """Return the slots that are free, or that the prefix cache would give up."""
    if not cache.supports_swa():
        return int(pool.available_size() + cache.evictable_size())
    full = pool.full_available_size() + cache.full_evictable_size()
    return int(min(full, pool.swa_available_size() + cache.swa_evictable_size()))
