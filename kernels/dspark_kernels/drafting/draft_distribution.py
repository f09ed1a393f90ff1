"""The distribution that drafts were drawn from, kept as scores and normalisers instead of probabilities.

Verification looks at a few tokens per slot and at one whole row per rejected request. Scores let it read just those,
and spare drafting the second pass over the vocabulary that normalised probabilities would cost.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

LEAST_TEMPERATURE = 0.01
"""Scores of a lower temperature are so large that float32 holds them to no more than 1e-3, and a distribution of such
scores is not the one that is drawn from. Every distribution is exact as a proposal; that of 0.01 is nearly greedy."""


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

    def check(self, drafts: torch.Tensor, vocab_size: int) -> None:
        """Raise a ValueError if drafts [bs, gamma] of a vocabulary of ``vocab_size`` cannot have this distribution."""
        own_vocab_size = self.scores.shape[2] if self.columns is None else self.columns.shape[0]
        (bs, gamma), drawn = drafts.shape, self.scores.shape[1]
        fits = self.scores.shape[0] == bs and self.log_norms.shape == (bs, drawn)
        if not fits or drawn > gamma or own_vocab_size != vocab_size:
            raise ValueError(
                f"the distribution of the drafts has scores {tuple(self.scores.shape)} over {own_vocab_size} tokens "
                f"where [bs, at most gamma] and V of the drafts and the target are {(bs, gamma)} and {vocab_size}; use "
                "a draft model with the target's vocabulary"
            )

    def mass(self, requests: torch.Tensor, slots: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
        """Return float32 p_d of the tokens in these slots of these requests; three int64 tensors that broadcast."""
        columns = tokens if self.columns is None else self.columns[tokens].long()
        exponents = self.scores[requests, slots, columns.clamp_min(0)] - self.log_norms[requests, slots]
        return exponents.exp().masked_fill_(columns < 0, 0.0)

    def row(self, requests: torch.Tensor, slots: torch.Tensor) -> torch.Tensor:
        """Return the distributions [m, V] float32 of one slot each of the requests ``requests`` [m]."""
        return self._written(self.scores[requests, slots], self.log_norms[requests, slots])

    def probs(self) -> torch.Tensor:
        """[bs, gamma, V] float32: the distribution written out. For tests; no host sync."""
        return self._written(self.scores, self.log_norms)

    def _written(self, scores: torch.Tensor, log_norms: torch.Tensor) -> torch.Tensor:
        proposed = torch.exp(scores - log_norms[..., None])
        if self.columns is None:
            return proposed
        return proposed[..., self.columns.clamp_min(0).long()].masked_fill_(self.columns < 0, 0.0)

    def spread(self, index: torch.Tensor, bs: int) -> DraftDistribution:
        """Return these rows as the requests ``index`` [m] int64 of a batch of ``bs``; the others get fillers."""
        scores, log_norms = (
            part.new_zeros((bs, *part.shape[1:])).index_copy_(0, index, part) for part in (self.scores, self.log_norms)
        )
        return DraftDistribution(scores, log_norms, self.columns)

    def first(self, bs: int) -> DraftDistribution:
        """Return the distribution of the first ``bs`` requests; no copy."""
        return DraftDistribution(self.scores[:bs], self.log_norms[:bs], self.columns)
