"""Attention callbacks of the draft backbone over the paged draft cache."""

from __future__ import annotations

from dataclasses import replace

import torch
from dspark_kernels.ragged_attention import ContextGroup, attend_groups, group_contexts
from dspark_kernels.window_attention import num_splits, window_attention

from sglang_dspark.draft.backbone import Attend
from sglang_dspark.draft.cache import DraftCache
from sglang_dspark.draft.config import DraftConfig
from sglang_dspark.draft.visibility import Visibility
from sglang_dspark.step.state import DecodeBatch


def block_attend(cache: DraftCache, step: DecodeBatch, num_slots: int, config: DraftConfig) -> Attend:
    """The callback of :meth:`DraftModel.forward_block` for this step, whose blocks have ``num_slots`` rows."""
    make = attend_on_cpu if step.anchors.device.type == "cpu" else attend_on_gpu
    attends = {seen: make(cache, step, num_slots, config, seen) for seen in set(config.visibilities)}
    of_layer = [attends[seen] for seen in config.visibilities]

    def attend(layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return of_layer[layer](layer, q, k, v)

    return attend


def attend_on_cpu(
    cache: DraftCache, step: DecodeBatch, num_slots: int, config: DraftConfig, visibility: Visibility
) -> Attend:
    """The callback for layers of this visibility, in torch; reads lengths on the host."""
    bs, heads_per_kv = len(step), config.num_attention_heads // config.num_key_value_heads
    table, rows, lens = _within_reach(step, visibility.reach)
    groups = group_contexts(
        table,
        rows.tolist(),
        lens.tolist(),
        [num_slots] * bs,
        causal=False,
        heads_per_kv=heads_per_kv,
        dtype=cache.k.dtype,
        extra_keys=num_slots,
    )
    if visibility.slides or visibility.causal:
        groups = [_masked(group, visibility, lens, num_slots, heads_per_kv, cache.k.dtype) for group in groups]

    def attend(layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return attend_groups(q, cache.k[layer], cache.v[layer], groups, config.attention_scale, extra_kv=(k, v))

    return attend


def attend_on_gpu(
    cache: DraftCache, step: DecodeBatch, num_slots: int, config: DraftConfig, visibility: Visibility
) -> Attend:
    """The callback for layers of this visibility, by the Triton kernel. No host sync; safe under graph capture."""
    assert not visibility.slides, "refused at start-up: the kernel shows all slots of a block the same context"
    bs, device = len(step), step.anchors.device
    table = _within_reach(step, visibility.reach)
    indptr = torch.arange(0, (bs + 1) * num_slots, num_slots, device=device)
    processors = torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 1
    splits = num_splits(bs, config.num_key_value_heads, processors)

    def attend(layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return window_attention(
            q,
            k,
            v,
            cache.k[layer],
            cache.v[layer],
            *table,
            indptr,
            width=num_slots,
            causal=visibility.causal,
            scale=config.attention_scale,
            splits=splits,
        )

    return attend


def _within_reach(step: DecodeBatch, reach: int | None) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Where the context rows are that any slot sees: the last ``reach`` of every request, all of them for None.

    Returns:
        A table of K/V slots, the row of each request [bs] in it, and how many of its columns [bs] count. No host sync.
    """
    if reach is None:
        return step.req_to_token, step.req_pool_indices, step.prefix_lens
    device, last = step.anchors.device, step.req_to_token.shape[1] - 1
    reach = min(reach, last + 1)
    columns = (step.prefix_lens - reach).clamp(min=0)[:, None] + torch.arange(reach, device=device)
    table = step.req_to_token[step.req_pool_indices[:, None], columns.clamp(max=last)]
    return table, torch.arange(len(step), device=device), step.prefix_lens.clamp(max=reach)


def _masked(
    group: ContextGroup,
    visibility: Visibility,
    lens: torch.Tensor,  # [bs]
    num_slots: int,
    heads_per_kv: int,
    dtype: torch.dtype,
) -> ContextGroup:
    """The group with a mask of what each slot sees."""
    members = slice(None) if group.queries is None else group.queries[::num_slots] // num_slots
    slots = torch.arange(num_slots)
    ages = (lens[members][:, None] - torch.arange(group.num_keys))[:, None]  # [R, 1, n]
    context = (ages > 0) & visibility.sees_context(ages, slots[:, None])
    block = visibility.sees_block(slots).expand(len(context), -1, -1)
    seen = torch.cat((context, block), dim=2)
    mask = torch.zeros(seen.shape, dtype=dtype).masked_fill_(~seen, float("-inf"))
    return replace(group, mask=mask.repeat(1, heads_per_kv, 1)[:, None])
