"""The distribution that drafts were drawn from, kept as scores and normalisers instead of probabilities.

Verification looks at a few tokens per slot and at one whole row per rejected request. Scores let it read just those,
and spare drafting the second pass over the vocabulary that normalised probabilities would cost.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class DraftDistribution:
    """p_d(token) = exp(scores[column of token] - log_norms), 0 for a token without a column.

    Attributes:
        scores: [bs, gamma, v] float32, corrected draft logits divided by the temperature; undefined for requests that
            are not sampled.
        log_norms: [bs, gamma] float32, logarithm of the sum of exp(scores) over a row; undefined likewise.
        columns: [V] int32, the column of scores that stands for a token, -1 for a token that is never proposed; None
            when v = V and column and token are the same number.
    """

    scores: torch.Tensor
    log_norms: torch.Tensor
    columns: torch.Tensor | None = None

    def probs(self) -> torch.Tensor:
        """[bs, gamma, V] float32: the distribution written out. For references and tests; no host sync."""
        proposed = torch.exp(self.scores - self.log_norms[..., None])
        if self.columns is None:
            return proposed
        known = self.columns >= 0
        return proposed[..., self.columns.clamp_min(0).long()].masked_fill_(~known, 0.0)

    def spread(self, index: torch.Tensor, bs: int) -> DraftDistribution:
        """Return these rows as the requests ``index`` [m] int64 of a batch of ``bs``; the others get fillers."""
        scores, log_norms = (
            part.new_zeros((bs, *part.shape[1:])).index_copy_(0, index, part) for part in (self.scores, self.log_norms)
        )
        return DraftDistribution(scores, log_norms, self.columns)

    def first(self, bs: int) -> DraftDistribution:
        """Return the distribution of the first ``bs`` requests; no copy."""
        return DraftDistribution(self.scores[:bs], self.log_norms[:bs], self.columns)
