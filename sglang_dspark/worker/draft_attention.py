"""Attention callbacks of the draft backbone over the paged draft cache."""

from collections.abc import Callable

import torch
from dspark_kernels import PagedWindows, StepRequests, attend_groups, block_groups, on_kernels, window_attention

from sglang_dspark.draft.backbone import Attend, DraftWindow
from sglang_dspark.draft.config import DraftConfig, Visibility
from sglang_dspark.draft.model import DraftCache

Pool = tuple[torch.Tensor, torch.Tensor]

BlockAttention = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, Pool, torch.Tensor | None], torch.Tensor]
"""[bs * num_slots, heads, hd] of one layer, given q, k and v of the blocks' rows, the layer's context K and V, and its
attention sinks [heads] where it has any."""


def block_attend(cache: DraftCache, requests: StepRequests, num_slots: int, config: DraftConfig) -> Attend:
    """Return the callback of :meth:`DraftModel.forward_block` for requests whose blocks have ``num_slots`` rows."""
    heads_per_kv, scale = config.num_attention_heads // config.num_key_value_heads, config.attention_scale

    attentions = {
        visibility: block_attention(
            requests, num_slots, visibility, heads_per_kv=heads_per_kv, dtype=cache.k.dtype, scale=scale
        )
        for visibility in set(config.visibilities)
    }
    of_layer = [attentions[visibility] for visibility in config.visibilities]

    def attend(
        layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, sinks: torch.Tensor | None
    ) -> torch.Tensor:
        return of_layer[layer](q, k, v, (cache.k[layer], cache.v[layer]), sinks)

    return attend


def block_attention_ref(
    requests: StepRequests,
    num_slots: int,
    visibility: Visibility,
    *,
    heads_per_kv: int,
    dtype: torch.dtype,
    scale: float,
) -> BlockAttention:
    """Compute :func:`block_attention` in plain torch. Reads lengths on the host."""
    near = requests if visibility.reach is None else DraftWindow(visibility.reach, sinks=0).of(requests)

    def sees(lens: torch.Tensor, num_keys: int) -> torch.Tensor:
        slots = torch.arange(num_slots, device=lens.device)
        ages = (lens[:, None] - torch.arange(num_keys, device=lens.device))[:, None]  # [R, 1, n]
        context = (ages > 0) & visibility.sees_context(ages, slots[:, None])
        block = visibility.sees_block(slots).expand(len(context), -1, -1)
        return torch.cat((context, block), dim=2)

    shown = None if visibility.is_full else sees
    layout = block_groups(near, num_slots, heads_per_kv=heads_per_kv, dtype=dtype, sees=shown)
    return lambda q, k, v, pool, sinks: attend_groups(q, *pool, layout, scale, extra_kv=(k, v), sinks=sinks)


@on_kernels(block_attention_ref)
def block_attention(
    requests: StepRequests,
    num_slots: int,
    visibility: Visibility,
    *,
    heads_per_kv: int,
    dtype: torch.dtype,
    scale: float,
) -> BlockAttention:
    """Compute the attention of blocks next to their contexts (DSpark, Eq. 3).

    Args:
        requests: of the step.
        num_slots: rows of a block.
        visibility: what these rows see of the context and of the block.
        heads_per_kv: query heads that share a K/V head.
        dtype: of queries and pools.
        scale: of the scores.

    Returns:
        What computes a layer. On a GPU without a host sync, and safe under graph capture.
    """
    indptr = torch.arange(0, (len(requests) + 1) * num_slots, num_slots, device=requests.anchors.device)
    windows = PagedWindows(
        *(requests.req_to_token, requests.req_pool_indices, requests.prefix_lens, indptr, num_slots),
        sliding_window=visibility.window,
        from_anchor=visibility.from_anchor,
    )
    return lambda q, k, v, pool, sinks: window_attention(
        q, (k, v), pool, windows, causal=visibility.causal, scale=scale, sinks=sinks
    )
