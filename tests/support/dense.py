"""Attention in float64, without any shortcut."""

import torch

FP32_TOL = {"atol": 2e-6, "rtol": 2e-6}  # sums of at most 200 products of unit-variance numbers


def dense_attention(q, k, v, mask, sinks=None):
    """[m, heads, hd] over [n, kv_heads, hd] in float64; mask [m, n] True where visible, sinks [heads] scores."""
    group = q.shape[1] // k.shape[1]
    q, k, v = q.double(), k.double().repeat_interleave(group, 1), v.double().repeat_interleave(group, 1)
    scores = torch.einsum("mhd,nhd->hmn", q, k) * q.shape[-1] ** -0.5
    scores = scores.masked_fill(~mask, float("-inf"))
    weights = scores.exp()
    total = weights.sum(-1, keepdim=True) + (0 if sinks is None else sinks.double().exp()[:, None, None])
    return torch.einsum("hmn,nhd->mhd", weights / total, v)
