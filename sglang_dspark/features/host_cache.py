"""Prefixes that move to host memory and come back (SGLang's hierarchical cache): the drafter's K/V moves along.

SGLang copies a draft pool along with the target's, so the drafter's K/V is shown as a pool of SGLang's own kind.
"""

from __future__ import annotations

import torch
from dspark_kernels import to_device
from sglang.srt.mem_cache.allocator import BaseTokenToKVPoolAllocator
from sglang.srt.mem_cache.memory_pool import GB, MHATokenToKVPool

from sglang_dspark.draft.model import DraftCache
from sglang_dspark.engine.batch import prompts_of
from sglang_dspark.engine.feature import Feature, FlagRule, off_gpu
from sglang_dspark.engine.part import Part, Worker
from sglang_dspark.engine.sglang_types import ScheduleBatch
from sglang_dspark.errors import UnservedError


class DraftPool(MHATokenToKVPool):
    """Present the memory of a :class:`DraftCache` layer by layer; its slots have the numbers of the target's.

    Args:
        cache: has a row for each slot, those of the padding page among them.
        size: K/V slots of the target without its padding page.
        page_size: of the target.
    """

    def __init__(self, cache: DraftCache, size: int, page_size: int) -> None:
        layers, slots, heads, head_dim = cache.k.shape
        assert slots == size + page_size, f"{slots} rows of draft K/V for {size} slots and a page of {page_size}"
        self._cache = cache
        super().__init__(
            size,
            page_size,
            cache.k.dtype,
            heads,
            head_dim,
            layers,
            str(cache.k.device),
            enable_memory_saver=False,
            enable_alt_stream=False,
            kv_cache_layout="nhd",  # whatever the target's
        )

    def _create_buffers_normal(self) -> None:
        # Instead of memory of its own: lists, because SGLang adds those of keys and values up.
        self.k_buffer, self.v_buffer = list(self._cache.k), list(self._cache.v)

    def _finalize_allocation_log(self, num_tokens: int) -> None:
        # The log has the size of the cache already.
        self.mem_usage = self._cache.num_bytes / GB


class HostCache(Part):
    """Have the drafter's K/V move along with the target's.

    Args:
        worker: ours.
    """

    def __init__(self, worker: Worker) -> None:
        self._worker = worker

    def pools_made(self, allocator: BaseTokenToKVPoolAllocator, cache: DraftCache | None) -> None:
        """Show SGLang the drafter's K/V; it fetches one of its layers with each of the target's.

        Raises:
            UnservedError: the drafter has more layers than the target.
        """
        if cache is None:
            return
        pool = self._worker.draft_pool = DraftPool(cache, allocator.size_full, allocator.page_size)
        if pool.layer_num > (layers := allocator.get_kvcache().layer_num):
            raise UnservedError(
                f"DSPARK cannot run with --enable-hierarchical-cache and a drafter of {pool.layer_num} layers, more "
                f"than the {layers} of the target; drop the flag"
            )

    def batch_comes(self, batch: ScheduleBatch) -> None:
        # What comes back for a prompt is waited for layer by layer; a decode step waits for nothing.
        self._worker.set_hicache_consumer(batch.hicache_consumer_index)

    def prefill_done(self, batch: ScheduleBatch) -> None:
        """Keep the tokens of cached prefixes: what comes back from host memory has slots of other texts."""
        table = batch.req_to_token_pool.req_to_token
        for req, length in zip(prompts_of(batch), batch.prefix_lens, strict=False):
            if length > 0:
                tokens = torch.tensor(req.get_fill_ids()[:length])
                slots = table[req.kv.req_pool_idx, :length]
                self._worker.drafter.remember(to_device(tokens, table.device), slots)


FEATURE = Feature(
    __name__,
    is_used=lambda args: args.enable_hierarchical_cache,
    flag_rules=(
        FlagRule(
            "hicache_storage_backend",
            (None,),
            "DSPARK keeps prefixes in host memory, and not in a storage backend",
            adjusts=True,
        ),
        FlagRule(
            "enable_hierarchical_cache",
            (False,),
            "SGLang copies K/V to host memory with CUDA kernels",
            adjusts=True,
            applies=off_gpu,
        ),
        FlagRule(
            "enable_hierarchical_cache",
            (False,),
            "DSPARK has not been tried with it and two K/V pools; --disable-hybrid-swa-memory gives the target a "
            "single pool if all heads have the same size",
            adjusts=True,
            applies=lambda context: context.target.is_hybrid_swa,
        ),
    ),
    part=HostCache,
)
