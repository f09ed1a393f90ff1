"""From confidences to verify lengths. No rule lets the value of a draft, or of a later one, decide about that draft.

A draft's survival is the probability that it and all drafts before it in its block are accepted: the running product of
the calibrated confidences (DSpark, Eq. 9). Survivals never grow along a block, so ranking them respects prefixes.
"""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray


def top_prefixes(survival: torch.Tensor, budget: int) -> torch.Tensor:
    """Verify lengths of the ``budget`` drafts with the largest survivals. No host sync.

    Ties go to the smaller position, then to the smaller request: otherwise a draft could be admitted without its
    predecessor, or by its own value. Whether draft (r, j) is admitted depends on no later draft of its block, because
    these rank behind it, and the budget was fixed before the block was drawn.

    Args:
        survival: [bs, depth], non-increasing along a row; entries above 1 are admitted first, negative ones never.
        budget: drafts to admit; at most bs * depth.

    Returns:
        [bs] int64 lengths, 0..depth.
    """
    bs, depth = survival.shape
    # Laid out position by position, a stable sort breaks ties in the order stated above.
    ranked = survival.T.reshape(-1).sort(descending=True, stable=True)
    admitted = torch.zeros(depth * bs, dtype=torch.int64, device=survival.device)
    admitted.index_fill_(0, ranked.indices[:budget], 1)  # an assignment would copy the 1 from the host, and wait
    return (admitted.view(depth, bs) * (survival.T >= 0)).sum(0)


def early_stop(survival: NDArray[np.float64], step_ms: NDArray[np.float64]) -> list[int]:
    """Algorithm 1 of DSpark (3.2.2): admit drafts best first while the expected throughput grows strictly.

    Stopping at the first candidate that does not improve is what keeps the output exact: a search over all lengths
    would let a draft's own value decide about it (DSpark, Appendix A).

    Args:
        survival: [bs, depth] live survivals.
        step_ms: [bs * depth + 1] time of a step that verifies that many drafts.

    Returns:
        Verify lengths.
    """
    bs = len(survival)
    # As in top_prefixes: ties to the smaller position, then to the smaller request.
    by_position = survival.T.reshape(-1)
    order = np.argsort(-by_position, kind="stable")
    expected = bs + np.cumsum(by_position[order])
    rates = np.concatenate([[bs / step_ms[0]], expected / step_ms[1:]])
    worse = np.flatnonzero((rates[1:] <= rates[:-1]) | (by_position[order] <= 0))
    admitted = int(worse[0]) if len(worse) else len(order)
    lens: list[int] = np.bincount(order[:admitted] % bs, minlength=bs).tolist()
    return lens


def above_threshold(confidence: torch.Tensor, threshold: float | torch.Tensor) -> torch.Tensor:
    """Drafts before the first one whose confidence lies below ``threshold`` (DSpark, 4.4). No host sync.

    The confidence of a draft is known before the draft is drawn, so it may decide about it.

    Args:
        confidence: [bs, depth] per-step acceptance probabilities.
        threshold: one for all, or one per request, [bs, 1].

    Returns:
        [bs] int64 lengths.
    """
    return (confidence >= threshold).to(torch.int64).cumprod(1).sum(1)
