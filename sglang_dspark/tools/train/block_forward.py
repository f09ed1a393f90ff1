"""Differentiable forward of the draft model over many blocks of the same texts at once."""

from __future__ import annotations

import torch
from torch import Tensor

from sglang_dspark.draft.config import DraftConfig
from sglang_dspark.draft.model import DraftModel
from sglang_dspark.draft.visibility import Visibility


class AnchoredAttention:
    """Attention of blocks over their text: the ``attend`` callable of `DraftModel.forward_block`.

    A row of a block sees what its layer shows of the context strictly before its anchor and of its own block, nothing
    else. Scores against the context and against the block are computed apart and share one softmax, so no block is ever
    scored against another block, as a packed ``[A * slots, S + A * slots]`` mask would have it.
    """

    def __init__(
        self,
        k_ctx: Tensor,  # [L, bs, S, kv_heads, head_dim]
        v_ctx: Tensor,  # [L, bs, S, kv_heads, head_dim]
        anchors: Tensor,  # [bs, A]
        config: DraftConfig,
    ) -> None:
        self._k_ctx = k_ctx.permute(0, 1, 3, 2, 4)  # [L, bs, kv_heads, S, head_dim]
        self._v_ctx = v_ctx.permute(0, 1, 3, 2, 4)
        self._ages = anchors[..., None] - torch.arange(k_ctx.shape[2], device=anchors.device)  # [bs, A, S]
        self._config = config
        group = config.num_attention_heads // config.num_key_value_heads
        masks = {seen: self._masks(seen, group) for seen in set(config.visibilities)}
        self._layer_masks = [masks[seen] for seen in config.visibilities]

    def _masks(self, visibility: Visibility, group: int) -> tuple[Tensor, Tensor | None]:
        """What rows do not see of the context, ``[bs, 1, A, rows or 1, S]``, and of the block, ``[rows, slots]``."""
        slots = torch.arange(self._config.block_size, device=self._ages.device)
        rows = (slots if visibility.slides else slots[:1]).repeat_interleave(group if visibility.slides else 1)
        ages = self._ages[:, None, :, None]
        hidden_ctx = (ages <= 0) | ~visibility.sees_context(ages, rows[:, None])
        if visibility.is_full:
            return hidden_ctx, None
        return hidden_ctx, ~visibility.sees_block(slots).repeat_interleave(group, dim=0)

    def __call__(
        self,
        layer: int,
        q: Tensor,  # [bs * A * slots, heads, head_dim]
        k: Tensor,  # [bs * A * slots, kv_heads, head_dim]
        v: Tensor,  # [bs * A * slots, kv_heads, head_dim]
        sinks: Tensor | None,  # [heads]
    ) -> Tensor:
        k_ctx, v_ctx = self._k_ctx[layer], self._v_ctx[layer]
        bs, kv_heads, _, head_dim = k_ctx.shape
        num_anchors = self._ages.shape[1]
        hidden_ctx, hidden_block = self._layer_masks[layer]
        heads = q.shape[1]
        k, v = (x.view(bs, num_anchors, -1, kv_heads, head_dim).permute(0, 3, 1, 2, 4) for x in (k, v))
        # The query heads of one key/value head become rows: [bs, kv_heads, A, slots * group, head_dim].
        grouped = q.view(bs, num_anchors, -1, kv_heads, heads // kv_heads, head_dim).permute(0, 3, 1, 2, 4, 5)
        grouped = grouped.flatten(3, 4) * self._config.attention_scale
        ctx_scores = (grouped.flatten(2, 3) @ k_ctx.transpose(-1, -2)).unflatten(2, (num_anchors, -1))
        ctx_scores = ctx_scores.masked_fill(hidden_ctx, float("-inf"))
        block_scores = grouped @ k.transpose(-1, -2)
        if hidden_block is not None:
            block_scores = block_scores.masked_fill(hidden_block, float("-inf"))
        parts = [ctx_scores, block_scores]
        if sinks is not None:
            of_rows = sinks.view(kv_heads, 1, -1).repeat(1, 1, k.shape[3])[..., None]  # [kv_heads, 1, slots * group, 1]
            parts.append(of_rows.to(q.dtype).expand(*ctx_scores.shape[:-1], 1))
        probs = torch.cat(parts, dim=-1).softmax(dim=-1, dtype=torch.float32).to(v.dtype)
        ctx_probs, block_probs = probs.split([part.shape[-1] for part in parts], dim=-1)[:2]
        mixed = (ctx_probs.flatten(2, 3) @ v_ctx).unflatten(2, (num_anchors, -1)) + block_probs @ v
        return mixed.unflatten(3, (-1, heads // kv_heads)).permute(0, 2, 3, 1, 4, 5).reshape(q.shape)


def context_kv(model: DraftModel, features: Tensor) -> tuple[Tensor, Tensor]:
    """Draft keys and values of whole texts: ``[bs, S, m * d]`` -> two ``[L, bs, S, kv_heads, head_dim]``."""
    bs, width = features.shape[:2]
    positions = torch.arange(width, device=features.device).repeat(bs)
    k, v = model.context_kv(model.project_context(features.flatten(0, 1)), positions)
    return k.unflatten(1, (bs, width)), v.unflatten(1, (bs, width))


def block_hidden(
    model: DraftModel,
    k_ctx: Tensor,  # [L, bs, S, kv_heads, head_dim]
    v_ctx: Tensor,
    anchors: Tensor,  # [bs, A]
    anchor_ids: Tensor,  # [bs, A]
) -> Tensor:
    """Hidden states after the final norm of the blocks at `anchors`: ``[bs, A, gamma, d]``."""
    config = model.config
    ids = torch.full((*anchors.shape, config.block_size), config.mask_token_id, device=anchors.device)
    ids[..., 0] = anchor_ids
    positions = anchors[..., None] + torch.arange(config.block_size, device=anchors.device)
    attend = AnchoredAttention(k_ctx, v_ctx, anchors, config)
    hidden = model.forward_block(model.embed(ids.flatten()), positions.flatten(), attend)
    return hidden.view(*ids.shape, -1)[..., config.first_slot :, :]


def block_latents(model: DraftModel, prev_ids: Tensor, hidden: Tensor) -> tuple[Tensor, Tensor]:
    """Teacher-forced Markov latents of whole blocks, whose product with ``markov_w2`` is the bias.

    Args:
        prev_ids: ``[B, gamma]``.
        hidden: ``[B, gamma, d]``.

    Returns:
        ``(latents, w1_embeddings)``, both ``[B, gamma, r]``.
    """
    markov = model.markov_head
    assert markov is not None, "only models with a Markov head have latents"
    w1_embeddings = markov.markov_w1(prev_ids)
    state = markov.initial_state(len(prev_ids), hidden.device, hidden.dtype)
    latents = []
    for slot in range(prev_ids.shape[1]):
        latent, state = markov.latent(w1_embeddings[:, slot], hidden[:, slot], state)
        latents.append(latent)
    return torch.stack(latents, dim=1), w1_embeddings
