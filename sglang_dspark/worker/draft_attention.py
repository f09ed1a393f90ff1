"""Attention callbacks of the draft backbone over the paged draft cache."""

from typing import Any

import torch
from dspark_kernels import (
    BlockAttention,
    StepRequests,
    attend_groups,
    block_attention,
    block_groups,
    block_windows,
    on_kernels,
    window_attention,
)

from sglang_dspark.draft.backbone import Attend, DraftWindow
from sglang_dspark.draft.config import DraftConfig, Visibility
from sglang_dspark.draft.model import DraftCache


def block_attend(cache: DraftCache, requests: StepRequests, num_slots: int, config: DraftConfig) -> Attend:
    """Return the callback of :meth:`DraftModel.forward_block` for requests whose blocks have ``num_slots`` rows."""
    heads_per_kv = config.num_attention_heads // config.num_key_value_heads
    given: Any = {"heads_per_kv": heads_per_kv, "dtype": cache.k.dtype, "scale": config.attention_scale}

    def attention(visibility: Visibility) -> BlockAttention:
        if visibility.is_full:
            return block_attention(requests, num_slots, **given)
        return partial_attention(requests, num_slots, visibility, **given)

    attentions = {visibility: attention(visibility) for visibility in set(config.visibilities)}
    of_layer = [attentions[visibility] for visibility in config.visibilities]

    def attend(
        layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, sinks: torch.Tensor | None
    ) -> torch.Tensor:
        return of_layer[layer](q, k, v, (cache.k[layer], cache.v[layer]), sinks)

    return attend


def partial_attention_ref(
    requests: StepRequests,
    num_slots: int,
    visibility: Visibility,
    *,
    heads_per_kv: int,
    dtype: torch.dtype,
    scale: float,
) -> BlockAttention:
    """Compute :func:`partial_attention` in plain torch. Reads lengths on the host."""
    near = requests if visibility.reach is None else DraftWindow(visibility.reach, sinks=0).of(requests)

    def sees(lens: torch.Tensor, num_keys: int) -> torch.Tensor:
        slots = torch.arange(num_slots, device=lens.device)
        ages = (lens[:, None] - torch.arange(num_keys, device=lens.device))[:, None]  # [R, 1, n]
        context = (ages > 0) & visibility.sees_context(ages, slots[:, None])
        block = visibility.sees_block(slots).expand(len(context), -1, -1)
        return torch.cat((context, block), dim=2)

    layout = block_groups(near, num_slots, heads_per_kv=heads_per_kv, dtype=dtype, sees=sees)
    return lambda q, k, v, pool, sinks: attend_groups(q, *pool, layout, scale, extra_kv=(k, v), sinks=sinks)


@on_kernels(partial_attention_ref)
def partial_attention(
    requests: StepRequests,
    num_slots: int,
    visibility: Visibility,
    *,
    heads_per_kv: int,
    dtype: torch.dtype,
    scale: float,
) -> BlockAttention:
    """Return :func:`block_attention` of blocks that see a part of their context, or of themselves.

    On a GPU it computes a layer without a host sync, and is safe under graph capture.
    """
    windows = block_windows(requests, num_slots, sliding_window=visibility.window, from_anchor=visibility.from_anchor)
    return lambda q, k, v, pool, sinks: window_attention(
        q, (k, v), pool, windows, causal=visibility.causal, scale=scale, sinks=sinks
    )
