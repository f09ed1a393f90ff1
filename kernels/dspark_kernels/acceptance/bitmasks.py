"""Forbidding tokens by the bit masks of grammar engines.

SGLang and xgrammar have kernels for this. This form knows neither, runs anywhere, and only guarded batches pay for it.
"""

from __future__ import annotations

import torch

_BITS = 32


def mask_tokens(
    logits: torch.Tensor,  # [N, V]
    rows: torch.Tensor,  # [m] int64
    bitmask: torch.Tensor,  # [m, W] int32
) -> None:
    """Set the logits of forbidden tokens to -inf, in place. No host sync.

    Args:
        logits: any float dtype.
        rows: rows to mask, none twice.
        bitmask: token v is allowed in row ``rows[i]`` when bit ``v % 32`` of ``bitmask[i, v // 32]`` is set; tokens
            without a bit are forbidden.
    """
    bits = torch.arange(_BITS, dtype=torch.int32, device=bitmask.device)
    allowed = ((bitmask[..., None] >> bits) & 1).flatten(1)[:, : logits.shape[1]] != 0
    missing = logits.shape[1] - allowed.shape[1]
    allowed = torch.nn.functional.pad(allowed, (0, missing)) if missing else allowed
    logits[rows] = logits[rows].masked_fill(~allowed, -torch.inf)
