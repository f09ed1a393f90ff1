"""Serve prefixes from host memory in a scheduler."""

from __future__ import annotations

import torch
from dspark_kernels import to_device
from sglang.srt.mem_cache.allocator import BaseTokenToKVPoolAllocator

from sglang_dspark.draft.cache import DraftCache
from sglang_dspark.engine.batch import prompts_of
from sglang_dspark.engine.part import Part, Worker
from sglang_dspark.engine.sglang_types import ScheduleBatch
from sglang_dspark.features.host_cache.draft_pool import DraftPool, check_layers


class HostCache(Part):
    """Have the drafter's K/V move along with the target's.

    Args:
        worker: ours.
    """

    def __init__(self, worker: Worker) -> None:
        self._worker = worker

    def pools_made(self, allocator: BaseTokenToKVPoolAllocator, cache: DraftCache | None) -> None:
        """Show SGLang the drafter's K/V.

        Raises:
            UnservedError: the drafter has more layers than the target.
        """
        if cache is not None:
            pool = DraftPool(cache, allocator.size_full, allocator.page_size)
            check_layers(pool, allocator.get_kvcache())
            self._worker.draft_pool = pool

    def batch_comes(self, batch: ScheduleBatch) -> None:
        # What comes back for a prompt is waited for layer by layer; a decode step waits for nothing.
        self._worker.set_hicache_consumer(batch.hicache_consumer_index)

    def prefill_done(self, batch: ScheduleBatch) -> None:
        """Keep the tokens of cached prefixes: what comes back from host memory has slots of other texts."""
        table = batch.req_to_token_pool.req_to_token
        for req, length in zip(prompts_of(batch), batch.prefix_lens, strict=False):
            if length > 0:
                tokens = torch.tensor(req.get_fill_ids()[:length])
                self._worker.remember(to_device(tokens, table.device), table[req.kv.req_pool_idx, :length])
