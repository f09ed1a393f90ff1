"""Candidates for the next tokens of requests, which compete with the drafter's own in the walk through a block.

Slot k is drawn from softmax(score + b [token = a_k]) while the drafts before it are a_0 .. a_(k-1), and as the drafter
says behind the first one that is not. b and a_k were fixed before the block was drawn, and whether they count at slot k
before its own draft was. The distribution that is stored is the raised one, so verification is the same as without
candidates.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache
from typing import TYPE_CHECKING, Any, TypeVar

import torch

if TYPE_CHECKING:
    from dspark_kernels.drafting.heads import DraftVocabulary

T = TypeVar("T", bound=Any)

LEAST_MATCH, MOST_MATCH = 3, 8
"""Tokens of a text's end that are looked for, at least (unless a request says otherwise) and at most."""
KIND_ROWS = MOST_MATCH + 1
"""Rows of the weights for a kind of chain: of a request's own text, of earlier answers, and of those asked for."""
CACHED_ROWS, ASKED_ROWS, NUM_ROWS = KIND_ROWS, 2 * KIND_ROWS, 3 * KIND_ROWS
"""What is added to the row of the weights of a chain from an earlier answer, and of one that its request has asked for,
whose tokens are drafted whatever others have been worth; and the number of rows."""
OUTRIGHT = 2.0
"""Boost from which a candidate is copied that the drafter has no column for, as it cannot draw it at any odds."""
MATCHED, FOLLOWED, FIRST = range(3)
"""Columns of chains: tokens of the text's end that were found again, drafts that follow the chain, and its tokens."""
LEAST, MOST, LENGTH, ROW = range(4)
"""Columns of :attr:`ChainRules.bounds`."""
USUAL = (LEAST_MATCH, MOST_MATCH, 1 << 30, 0)
"""Bounds of a request that asks for nothing."""


@dataclass(frozen=True)
class SecondTexts:
    """Hold texts in which the ends of requests' own are looked up as well, one text behind the other.

    Attributes:
        tokens: [L] int64, -1 before each part of a text and behind the last.
        needed: [L] int64, how many tokens have to match up to each place.
        rows: [L] int64, what is added to ``MATCHED`` of a chain from there: ``CACHED_ROWS`` or ``ASKED_ROWS``.
        requests: [L] int64, index of the request that has the place; past the last one for none.
    """

    tokens: torch.Tensor
    needed: torch.Tensor
    rows: torch.Tensor
    requests: torch.Tensor

    def take(self, index: torch.Tensor, bs: int) -> SecondTexts:
        """Return the texts of some of ``bs`` requests, each named once at most.

        No host sync: places of the others stay, and belong to none.
        """
        renamed = torch.full((bs + 1,), len(index), device=index.device)
        renamed[index] = torch.arange(len(index), device=index.device)
        return replace(self, requests=renamed[self.requests])

    def beside(self, other: SecondTexts | None) -> SecondTexts:
        """Return these texts and others of the same requests."""
        if other is None:
            return self
        return SecondTexts(*map(torch.cat, zip(vars(self).values(), vars(other).values(), strict=True)))


@dataclass(frozen=True)
class ChainRules:
    """Hold what requests ask of their chains.

    Attributes:
        bounds: [bs, 4] int64: tokens that have to match, tokens that are looked for (up to ``MOST_MATCH``),
            the most candidates, and what is added to a chain's ``MATCHED``: 0 or ``ASKED_ROWS``.
        second: beside the requests' own texts; None if no request has one.
    """

    bounds: torch.Tensor
    second: SecondTexts | None = None

    def take(self, index: torch.Tensor) -> ChainRules:
        """Return the rules of some requests."""
        second = None if self.second is None else self.second.take(index, len(self.bounds))
        return ChainRules(self.bounds[index], second)


@cache
def usual_bounds(device: torch.device) -> torch.Tensor:
    """Return [1, 4] :attr:`ChainRules.bounds` of a request that asks for nothing."""
    return torch.tensor([USUAL], device=device)


@dataclass(frozen=True)
class Candidates:
    """A chain of candidates for each request, and what they weigh.

    Attributes:
        chains: [bs, 2 + m] int64, m at least the depth of the block; the walk counts in ``FOLLOWED``. A token of -1 is
            no candidate. ``MATCHED`` is 0 for a request without a chain.
        weights: [2, NUM_ROWS, at least the depth] float32, by ``MATCHED`` and slot: what is added to the
            candidate's score, in nats; and the confidence logit that a slot has at least while the chain is alive.
    """

    chains: torch.Tensor
    weights: torch.Tensor

    @staticmethod
    def no_chains(bs: int, num_candidates: int, device: torch.device) -> torch.Tensor:
        """Return [bs, 2 + num_candidates] int64 chains of requests for which nothing was found."""
        chains = torch.full((bs, FIRST + num_candidates), -1, device=device)
        chains[:, :FIRST] = 0
        return chains

    @staticmethod
    def parts(chains: T) -> tuple[T, T, T]:
        """Return matched tokens [bs], drafts that followed [bs] and candidates [bs, m] of chains, as views."""
        return chains[:, MATCHED], chains[:, FOLLOWED], chains[:, FIRST:]

    def offers(self, depth: int, vocabulary: DraftVocabulary | None) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return candidates [bs, depth], the nats that they are raised by, and their columns of the draft logits.

        The column is -1 where there is no candidate, or none that the drafter proposes. No host sync.
        """
        matched, _, tokens = self.parts(self.chains)
        tokens = tokens[:, :depth]
        columns = tokens if vocabulary is None else vocabulary.columns[tokens.clamp_min(0)].long()
        return tokens, self.weights[0, matched, :depth], torch.where(tokens < 0, -1, columns)

    def follow(self, drafts: torch.Tensor) -> None:
        """Count the leading drafts of blocks [bs, depth] that are candidates."""
        _, _, candidates = self.parts(self.chains)
        self.chains[:, FOLLOWED] = (drafts == candidates[:, : drafts.shape[1]]).cumprod(1).sum(1)

    def sure(self, confidence_logits: torch.Tensor) -> torch.Tensor:
        """Return confidence logits [bs, depth], of live chains as high as these ask for."""
        slots = torch.arange(confidence_logits.shape[1], device=confidence_logits.device)
        least = self.weights[1, self.chains[:, MATCHED], : len(slots)]
        is_alive = self.chains[:, FOLLOWED, None] >= slots
        return torch.where(is_alive, torch.maximum(confidence_logits, least), confidence_logits)
