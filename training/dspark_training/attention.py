"""Attention of the blocks at many anchors over their texts, without a matrix of all scores.

A row of a block sees what its layer shows of the context strictly before its anchor and of its own block, nothing else.
Scores of all blocks take ``A * slots * heads * (S + slots)`` elements in each layer: 15 GB in float32 for one text of
4096 tokens, 512 anchors and the heads of Qwen3-8B, so they are never held at once.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from sglang_dspark.draft.config import DraftConfig, Visibility

CHUNK_SCORES = 2**24
"""Scores that `ChunkedAttention` holds at a time: 64 MiB in float32."""


class ChunkedAttention:
    """Dense attention of a few anchors at a time, whose scores are computed again in the backward pass.

    It is the ``attend`` callable of `DraftModel.forward_block`. Scores against the context and against the block are
    computed apart and share one softmax, so no block is ever scored against another one. What fits one chunk keeps its
    scores: computing them again would cost time for nothing.
    """

    def __init__(
        self,
        k_ctx: Tensor,  # [L, bs, S, kv_heads, head_dim]
        v_ctx: Tensor,  # [L, bs, S, kv_heads, head_dim]
        anchors: Tensor,  # [bs, A], ascending in a row except for unused ones at its end, which are 0
        config: DraftConfig,
    ) -> None:
        self._k_ctx = k_ctx.permute(0, 1, 3, 2, 4)  # [L, bs, kv_heads, S, head_dim]
        self._v_ctx = v_ctx.permute(0, 1, 3, 2, 4)
        self._anchors = anchors
        self._config = config
        bs, num_anchors = anchors.shape
        scores_per_anchor = bs * config.num_attention_heads * config.block_size * (k_ctx.shape[2] + config.block_size)
        chunk = max(1, CHUNK_SCORES // scores_per_anchor)
        parts = [slice(start, start + chunk) for start in range(0, num_anchors, chunk)]
        # No anchor of a part sees the context from its last one on.
        self._parts = [(part, max(1, int(anchors[:, part].max()))) for part in parts]

    def __call__(
        self,
        layer: int,
        q: Tensor,  # [bs * A * slots, heads, head_dim]
        k: Tensor,  # [bs * A * slots, kv_heads, head_dim]
        v: Tensor,  # [bs * A * slots, kv_heads, head_dim]
        sinks: Tensor | None,  # [heads]
    ) -> Tensor:
        kv_heads, heads = k.shape[1], q.shape[1]
        blocks = (*self._anchors.shape, self._config.block_size)
        k, v = (x.view(*blocks, kv_heads, -1).permute(0, 3, 1, 2, 4) for x in (k, v))
        # The query heads of one key/value head become rows: [bs, kv_heads, A, slots * group, head_dim].
        grouped = q.view(*blocks, kv_heads, heads // kv_heads, -1).permute(0, 3, 1, 2, 4, 5).flatten(3, 4)
        grouped = grouped * self._config.attention_scale
        mixed = torch.cat([self._attend_part(layer, grouped, k, v, sinks, *part) for part in self._parts], dim=2)
        return mixed.unflatten(3, (-1, heads // kv_heads)).permute(0, 2, 3, 1, 4, 5).reshape(q.shape)

    def _attend_part(
        self, layer: int, grouped: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, part: slice, end: int
    ) -> Tensor:
        arguments = (
            self._config.visibilities[layer],
            self._anchors[:, part],
            grouped[:, :, part],
            k[:, :, part],
            v[:, :, part],
            self._k_ctx[layer, :, :, :end],
            self._v_ctx[layer, :, :, :end],
            sinks,
        )
        if len(self._parts) == 1 or not torch.is_grad_enabled():
            return _attend_dense(*arguments)
        mixed: Tensor = checkpoint(_attend_dense, *arguments, use_reentrant=False, preserve_rng_state=False)
        return mixed


def _attend_dense(
    visibility: Visibility,
    anchors: Tensor,  # [bs, A]
    grouped: Tensor,  # [bs, kv_heads, A, slots * group, head_dim], times the scale of the scores
    k: Tensor,  # [bs, kv_heads, A, slots, head_dim]
    v: Tensor,  # [bs, kv_heads, A, slots, head_dim]
    k_ctx: Tensor,  # [bs, kv_heads, S, head_dim]
    v_ctx: Tensor,  # [bs, kv_heads, S, head_dim]
    sinks: Tensor | None,  # [heads]
) -> Tensor:
    """Return mixed values ``[bs, kv_heads, A, slots * group, head_dim]``."""
    num_anchors, num_rows = grouped.shape[2:4]
    slots = torch.arange(k.shape[3], device=k.device)
    group = num_rows // len(slots)
    # All slots see the same context where no window slides with them.
    rows = slots.repeat_interleave(group) if visibility.slides else slots[:1]
    ages = (anchors[..., None] - torch.arange(k_ctx.shape[2], device=k.device))[:, None, :, None]  # [bs, 1, A, 1, S]
    hidden_ctx = (ages <= 0) | ~visibility.sees_context(ages, rows[:, None])
    ctx_scores = (grouped.flatten(2, 3) @ k_ctx.transpose(-1, -2)).unflatten(2, (num_anchors, -1))
    ctx_scores = ctx_scores.masked_fill(hidden_ctx, float("-inf"))
    block_scores = grouped @ k.transpose(-1, -2)
    if not visibility.is_full:
        hidden_block = ~visibility.sees_block(slots).repeat_interleave(group, dim=0)
        block_scores = block_scores.masked_fill(hidden_block, float("-inf"))
    scores = [ctx_scores, block_scores]
    if sinks is not None:
        of_rows = sinks.view(k.shape[1], 1, group).repeat(1, 1, len(slots))  # [kv_heads, 1, slots * group]
        scores.append(of_rows[..., None].to(ctx_scores.dtype).expand(*ctx_scores.shape[:-1], 1))
    probs = torch.cat(scores, dim=-1).softmax(dim=-1, dtype=torch.float32).to(v.dtype)
    ctx_probs, block_probs = probs.split([part.shape[-1] for part in scores], dim=-1)[:2]
    return (ctx_probs.flatten(2, 3) @ v_ctx).unflatten(2, (num_anchors, -1)) + block_probs @ v
