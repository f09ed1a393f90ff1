"""Show the drafter's K/V as a pool of SGLang's own kind, to features that copy a draft pool along with the target's."""

from __future__ import annotations

from sglang.srt.mem_cache.memory_pool import GB, KVCache, MHATokenToKVPool

from sglang_dspark.draft.cache import DraftCache
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


def check_layers(draft_pool: DraftPool, target_pool: KVCache) -> None:
    """Refuse a drafter whose layers SGLang would not all fetch: it fetches one of them with each of the target's.

    Raises:
        UnservedError: the drafter has more layers than the target.
    """
    if draft_pool.layer_num > target_pool.layer_num:
        raise UnservedError(
            f"DSPARK cannot run with --enable-hierarchical-cache and a drafter of {draft_pool.layer_num} layers for a "
            f"target of {target_pool.layer_num}; drop the flag"
        )
