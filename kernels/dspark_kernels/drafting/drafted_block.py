"""A drafted block."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from dspark_kernels.drafting.candidates import ASKED_ROWS, FOLLOWED, Candidates
from dspark_kernels.drafting.draft_distribution import DraftDistribution
from dspark_kernels.drafting.heads import DraftVocabulary
from dspark_kernels.sampling.parameters import SamplingBatch

_NEVER = -30.0
"""Confidence logit of a candidate that its chain does not reach."""


@dataclass(frozen=True)
class DraftBlock:
    """A drafted block.

    ``distribution`` and ``copied`` may have fewer slots, the first ``drawn`` of gamma: the tokens behind those were
    copied.

    Attributes:
        tokens: [bs, gamma] int64.
        confidence_logits: [bs, gamma] float32, uncalibrated; None without a confidence head.
        distribution: what the tokens of sampled requests were drawn from, arbitrary for the others; None when none was
            drawn for a sampled request.
        copied: [bs, drawn] bool, tokens that were not drawn but copied from elsewhere: their proposal is one-hot,
            whatever ``distribution`` says; None without any.
        chains: [bs, 2 + m] int64 of :class:`Candidates`; None without.
    """

    tokens: torch.Tensor
    confidence_logits: torch.Tensor | None = None
    distribution: DraftDistribution | None = None
    copied: torch.Tensor | None = None
    chains: torch.Tensor | None = None

    @staticmethod
    def empty(bs: int, device: torch.device | str) -> DraftBlock:
        """Blocks without drafts, as plain steps have them."""
        return DraftBlock(torch.empty((bs, 0), dtype=torch.int64, device=device))

    @staticmethod
    def of_chains(chains: torch.Tensor, depth: int) -> DraftBlock:
        """Blocks of nothing but the candidates that requests have asked for; confidence logits say if there are any."""
        rows, _, candidates = Candidates.parts(chains)
        candidates = candidates[:, :depth]
        is_there = ((candidates >= 0) & (rows[:, None] >= ASKED_ROWS)).cumprod(1)
        chains[:, FOLLOWED] = is_there.sum(1)
        copied = torch.ones_like(is_there, dtype=torch.bool)
        return DraftBlock(candidates.clamp_min(0), 60.0 * is_there - 30.0, copied=copied, chains=chains)

    def spread(self, index: torch.Tensor, bs: int) -> DraftBlock:
        """Return a batch of ``bs`` requests in which ``index`` [m] int64 have these blocks, the others fillers."""

        def scatter(part: torch.Tensor | None) -> torch.Tensor | None:
            return None if part is None else part.new_zeros((bs, *part.shape[1:])).index_copy_(0, index, part)

        tokens = scatter(self.tokens)
        assert tokens is not None
        distribution = None if self.distribution is None else self.distribution.spread(index, bs)
        logits, copied, chains = map(scatter, (self.confidence_logits, self.copied, self.chains))
        return DraftBlock(tokens, logits, distribution, copied, chains)

    def first(self, bs: int) -> DraftBlock:
        """Return the first ``bs`` requests; no copy."""
        distribution = None if self.distribution is None else self.distribution.first(bs)
        parts = self.confidence_logits, self.copied, self.chains
        logits, copied, chains = (None if part is None else part[:bs] for part in parts)
        return DraftBlock(self.tokens[:bs], logits, distribution, copied, chains)

    def with_candidates(
        self, candidates: Candidates, vocabulary: DraftVocabulary | None, rows: SamplingBatch
    ) -> DraftBlock:
        """Return this block, whose walk had candidates: a draft without a column was not drawn."""
        copied = None
        if vocabulary is not None and rows.any_sampled:
            copied = vocabulary.columns[self.tokens] < 0
        return replace(self, copied=copied, chains=candidates.chains)

    def with_tail(self, candidates: Candidates, depth: int) -> DraftBlock:
        """Return blocks of up to ``depth`` slots, whose slots behind this walk's are copied candidates.

        They are sure only while the chain is alive: what the walk drew decides about them, their own tokens do not.
        """
        drawn = self.tokens.shape[1]
        if depth <= drawn:
            return self
        matched, followed, tokens = candidates.parts(candidates.chains)
        tail = tokens[:, drawn:depth]
        is_alive = (followed[:, None] >= drawn) & (tail >= 0).cumprod(1).bool()
        tokens = torch.cat((self.tokens, tail.clamp_min(0)), 1)
        candidates.follow(tokens)
        logits = self.confidence_logits
        if logits is not None:
            least = candidates.weights[1, matched, drawn:depth].clamp_min(_NEVER)
            logits = torch.cat((logits, torch.where(is_alive, least, _NEVER)), 1)
        return replace(self, tokens=tokens, confidence_logits=logits, chains=candidates.chains)
