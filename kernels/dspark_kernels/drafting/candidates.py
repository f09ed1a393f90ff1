"""Candidates for the next tokens of requests, which compete with the drafter's own in the walk through a block.

Slot k is drawn from softmax(score + b [token = a_k]) while the drafts before it are a_0 .. a_(k-1), and as the drafter
says behind the first one that is not. b and a_k were fixed before the block was drawn, and whether they count at slot k
before its own draft was. The distribution that is stored is the raised one, so verification is the same as without
candidates.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Any, TypeVar

import torch

T = TypeVar("T", bound=Any)

LEAST_MATCH, MOST_MATCH = 3, 8
"""Tokens of a text's end that are looked for, at least (unless a request says otherwise) and at most."""
ASKED_ROWS = MOST_MATCH + 1
"""What is added to the row of the weights of a chain that its request has asked for: its tokens are drafted whatever
others have been worth."""
OUTRIGHT = 2.0
"""Boost from which a candidate is copied that the drafter has no column for, as it cannot draw it at any odds."""
MATCHED, FOLLOWED, FIRST = range(3)
"""Columns of chains: tokens of the text's end that were found again, drafts that follow the chain, and its tokens."""
LEAST, MOST, LENGTH, ROW = range(4)
"""Columns of :attr:`ChainRules.bounds`."""
USUAL = (LEAST_MATCH, MOST_MATCH, 1 << 30, 0)
"""Bounds of a request that asks for nothing."""


@dataclass(frozen=True)
class ChainRules:
    """Hold what requests ask of their chains.

    Attributes:
        bounds: [bs, 4] int64: tokens that have to match, tokens that are looked for (up to ``MOST_MATCH``),
            the most candidates, and what is added to a chain's ``MATCHED``: 0 or ``ASKED_ROWS``.
        labels: [2, bs, L] int64: a text that is looked up before the request's own, -1 before each of its parts and
            behind the last; and how many tokens have to match up to each place. None if no request has one.
    """

    bounds: torch.Tensor
    labels: torch.Tensor | None = None

    def take(self, index: torch.Tensor) -> ChainRules:
        """Return the rules of some requests."""
        return ChainRules(self.bounds[index], None if self.labels is None else self.labels[:, index])


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
        weights: [2, 2 * ASKED_ROWS, at least the depth] float32, by ``MATCHED`` and slot: what is added to the
            candidate's score, in nats; and the confidence logit that a slot has at least while the chain is alive.
    """

    chains: torch.Tensor
    weights: torch.Tensor

    @staticmethod
    def parts(chains: T) -> tuple[T, T, T]:
        """Return matched tokens [bs], drafts that followed [bs] and candidates [bs, m] of chains, as views."""
        return chains[:, MATCHED], chains[:, FOLLOWED], chains[:, FIRST:]

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
