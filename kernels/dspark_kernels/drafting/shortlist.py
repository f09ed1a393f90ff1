"""The few tokens that compete for a slot of a block, where a drafter's head ranks no others (DFlash 2's selector).

Of a slot's base logits the best are kept, and the Markov head chooses among them. All others have probability 0, so the
distribution of the drafts is sparse and exact: verification divides by the very softmax that drew them.
"""

from __future__ import annotations

import torch

from dspark_kernels.drafting.candidates import Candidates
from dspark_kernels.drafting.heads import DraftHeads

CERTAIN = 30.0
"""Largest confidence logit: a token that has no rival is not certain to be accepted."""


def competing_columns(
    base_logits: torch.Tensor,  # [bs, gamma, v]
    heads: DraftHeads,
    candidates: Candidates | None = None,
) -> torch.Tensor | None:
    """Return the columns that compete for each slot, best first; None if all do. No host sync.

    Returns:
        [bs, gamma, k] int64, or one more with candidates: that of the candidate of the text if it weighs anything,
        wherever it ranks; else the best one again.
    """
    if heads.shortlist is None:
        return None
    columns = base_logits.topk(min(heads.shortlist, base_logits.shape[-1])).indices
    if candidates is None:
        return columns
    _, nats, offered = candidates.offers(base_logits.shape[1], heads.vocabulary)
    competes = ((offered >= 0) & (nats > 0))[..., None]
    return torch.cat((columns, torch.where(competes, offered[..., None], columns[..., :1])), -1)


def log_odds(scores: torch.Tensor, competing: torch.Tensor, heads: DraftHeads) -> torch.Tensor:
    """Return [bs] float32 log odds of a slot's likeliest token by ``scores`` [bs, v] of its shortlist, temperature 1.

    Of a greedy request that is the draft. Of a sampled one it must not be: what decides whether a draft is verified may
    depend on the drafts before it, and not on the draft.
    """
    listed = competing[:, : min(heads.shortlist or 0, scores.shape[1])]
    ranked, _ = scores.gather(1, listed).float().sort(-1, descending=True)
    return (ranked[:, 0] - ranked[:, 1:].logsumexp(-1)).clamp(-CERTAIN, CERTAIN)
