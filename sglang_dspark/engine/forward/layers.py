"""Ask SGLang's model what the attention of verification needs to know."""

from __future__ import annotations

import torch
from sglang.srt.layers.radix_attention import RadixAttention
from sglang.srt.mem_cache.memory_pool import KVCache
from sglang.srt.mem_cache.swa_memory_pool import SWAKVPool
from sglang.srt.speculative.spec_info import SpecInput


def sliding_window(layer: RadixAttention) -> int | None:
    """Return the most keys that a row of this ``RadixAttention`` sees, its own among them; None if it sees all."""
    # SGLang leaves the row's own key out, and has -1 without a window.
    return int(layer.sliding_window_size) + 1 if layer.sliding_window_size >= 0 else None


def row_bounds(layout: SpecInput, rows: torch.Tensor) -> torch.Tensor:
    """Return [bs + 1] int, the first row of each request of a verification, by its ``spec_info`` and its rows [N, ...].

    The dummy forwards by which SGLang tunes experts verify as many rows for every request.
    """
    indptr: torch.Tensor | None = getattr(layout, "indptr", None)
    return torch.arange(0, len(rows) + 1, layout.draft_token_num, device=rows.device) if indptr is None else indptr


def slot_translation(pool: KVCache) -> torch.Tensor | None:
    """Return the [slots + 1] int64 rows of the pool of layers with a window, by the slots that SGLang hands out.

    A slot without a row there has 0. None if ``pool`` holds all layers alike. The tensor stays where it is.
    """
    return pool.full_to_swa_index_mapping if isinstance(pool, SWAKVPool) else None


def translation_of_layer(layer: RadixAttention, pool: KVCache) -> torch.Tensor | None:
    """Return :func:`slot_translation` if the K/V that this ``RadixAttention`` reads lie in that pool, else None."""
    has_own = isinstance(pool, SWAKVPool) and pool.layers_mapping[layer.layer_id][1]
    return slot_translation(pool) if has_own else None


def kv_heads_of_layers(model: torch.nn.Module) -> set[int]:
    """Return the numbers of K/V heads that layers have on this rank; those with a window may have another one."""
    return {int(layer.tp_k_head_num) for layer in model.modules() if isinstance(layer, RadixAttention)}
