"""Differentiable forward of the draft model over many blocks of the same texts at once."""

from __future__ import annotations

import torch
from torch import Tensor

from dspark_training.attention import ChunkedAttention
from sglang_dspark.draft.model import DraftModel


def context_kv(model: DraftModel, features: Tensor) -> tuple[Tensor, Tensor]:
    """Return draft keys and values of texts: ``[bs, S, m * d]`` -> two ``[L, bs, S, kv_heads, head_dim]``."""
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
    """Return the hidden states after the final norm of the blocks at `anchors`: ``[bs, A, gamma, d]``."""
    config = model.config
    ids = torch.full((*anchors.shape, config.block_size), config.mask_token_id, device=anchors.device)
    ids[..., 0] = anchor_ids
    positions = anchors[..., None] + torch.arange(config.block_size, device=anchors.device)
    attend = ChunkedAttention(k_ctx, v_ctx, anchors, config)
    return model.forward_block(model.embed(ids), positions, attend)[..., config.first_slot :, :]


def block_latents(model: DraftModel, prev_ids: Tensor, hidden: Tensor) -> tuple[Tensor, Tensor]:
    """Return the teacher-forced Markov latents of whole blocks, whose product with ``markov_w2`` is the bias.

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
