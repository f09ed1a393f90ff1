"""Differentiable forward of the draft model over many blocks of the same texts at once."""

from __future__ import annotations

import torch
from torch import Tensor

from sglang_dspark.draft.model import DraftModel


class AnchoredAttention:
    """Attention of blocks over their text: the ``attend`` callable of `DraftModel.forward_block`.

    A row of a block sees the context strictly before its anchor and all rows of its own block, nothing else. Scores
    against the context and against the block are computed apart and share one softmax, so no block is ever scored
    against another block, as a packed ``[A * gamma, S + A * gamma]`` mask would have it.
    """

    def __init__(
        self,
        k_ctx: Tensor,  # [L, bs, S, kv_heads, head_dim]
        v_ctx: Tensor,  # [L, bs, S, kv_heads, head_dim]
        anchors: Tensor,  # [bs, A]
    ) -> None:
        self._k_ctx = k_ctx.permute(0, 1, 3, 2, 4)  # [L, bs, kv_heads, S, head_dim]
        self._v_ctx = v_ctx.permute(0, 1, 3, 2, 4)
        self._hidden_ctx = (torch.arange(k_ctx.shape[2], device=anchors.device) >= anchors[..., None])[:, None, :, None]

    def __call__(
        self,
        layer: int,
        q: Tensor,  # [bs * A * gamma, heads, head_dim]
        k: Tensor,  # [bs * A * gamma, kv_heads, head_dim]
        v: Tensor,  # [bs * A * gamma, kv_heads, head_dim]
    ) -> Tensor:
        k_ctx, v_ctx = self._k_ctx[layer], self._v_ctx[layer]
        bs, kv_heads, ctx_len, head_dim = k_ctx.shape
        num_anchors = self._hidden_ctx.shape[2]
        heads = q.shape[1]
        k, v = (x.view(bs, num_anchors, -1, kv_heads, head_dim).permute(0, 3, 1, 2, 4) for x in (k, v))
        # The query heads of one key/value head become rows: [bs, kv_heads, A, gamma * group, head_dim].
        grouped = q.view(bs, num_anchors, -1, kv_heads, heads // kv_heads, head_dim).permute(0, 3, 1, 2, 4, 5)
        grouped = grouped.flatten(3, 4) * head_dim**-0.5
        ctx_scores = (grouped.flatten(2, 3) @ k_ctx.transpose(-1, -2)).unflatten(2, (num_anchors, -1))
        ctx_scores = ctx_scores.masked_fill(self._hidden_ctx, float("-inf"))
        scores = torch.cat([ctx_scores, grouped @ k.transpose(-1, -2)], dim=-1)
        probs = scores.softmax(dim=-1, dtype=torch.float32).to(v.dtype)
        ctx_probs, block_probs = probs.split((ctx_len, k.shape[3]), dim=-1)
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
    gamma = model.config.block_size
    ids = torch.full((*anchors.shape, gamma), model.config.mask_token_id, device=anchors.device)
    ids[..., 0] = anchor_ids
    positions = anchors[..., None] + torch.arange(gamma, device=anchors.device)
    attend = AnchoredAttention(k_ctx, v_ctx, anchors)
    hidden = model.forward_block(model.embed(ids.flatten()), positions.flatten(), attend)
    return hidden.view(*ids.shape, -1)


def block_latents(model: DraftModel, prev_ids: Tensor, hidden: Tensor) -> tuple[Tensor, Tensor]:
    """Teacher-forced Markov latents of whole blocks, whose product with ``markov_w2`` is the bias.

    Args:
        prev_ids: ``[B, gamma]``.
        hidden: ``[B, gamma, d]``.

    Returns:
        ``(latents, w1_embeddings)``, both ``[B, gamma, r]``.
    """
    markov = model.markov
    assert markov is not None, "only models with a Markov head have latents"
    w1_embeddings = markov.markov_w1(prev_ids)
    state = markov.initial_state(len(prev_ids), hidden.device, hidden.dtype)
    latents = []
    for slot in range(prev_ids.shape[1]):
        latent, state = markov.latent(w1_embeddings[:, slot], hidden[:, slot], state)
        latents.append(latent)
    return torch.stack(latents, dim=1), w1_embeddings
