"""Attention callbacks of the draft backbone over the paged draft cache."""

from __future__ import annotations

import torch
from dspark_kernels.attention.ragged import attend_groups, group_contexts
from dspark_kernels.attention.window import num_splits, window_attention

from sglang_dspark.draft.backbone import Attend
from sglang_dspark.draft.cache import DraftCache
from sglang_dspark.draft.config import DraftConfig
from sglang_dspark.step.state import DecodeBatch


def block_attend(cache: DraftCache, step: DecodeBatch, gamma: int, config: DraftConfig) -> Attend:
    """The callback of :meth:`DraftModel.forward_block` for this step, whose blocks have ``gamma`` rows."""
    bs = len(step)
    scale = config.head_dim**-0.5
    if step.anchors.device.type == "cpu":
        groups = group_contexts(
            step.req_to_token,
            step.req_pool_indices.tolist(),
            step.prefix_lens.tolist(),
            [gamma] * bs,
            causal=False,
            heads_per_kv=config.num_attention_heads // config.num_key_value_heads,
            dtype=cache.k.dtype,
            extra_keys=gamma,
        )

        def attend(layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
            return attend_groups(q, cache.k[layer], cache.v[layer], groups, scale, extra_kv=(k, v))

    else:
        indptr = torch.arange(0, (bs + 1) * gamma, gamma, device=step.anchors.device)
        processors = torch.cuda.get_device_properties(step.anchors.device).multi_processor_count
        splits = num_splits(bs, config.num_key_value_heads, processors)

        def attend(layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
            table = step.req_to_token, step.req_pool_indices, step.prefix_lens, indptr
            return window_attention(
                q, k, v, cache.k[layer], cache.v[layer], *table, width=gamma, causal=False, scale=scale, splits=splits
            )

    return attend
