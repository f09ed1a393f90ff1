"""The few tokens that compete for a slot of a block, where a drafter's head ranks no others (DFlash 2's selector).

Of a slot's base logits the best are kept, and the Markov head chooses among them. All others have probability 0, so the
distribution of the drafts is sparse and exact: verification divides by the very softmax that drew them.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F

from dspark_kernels.drafting.candidates import Candidates
from dspark_kernels.drafting.heads import DraftHeads

_CERTAIN = 30.0
"""Largest confidence logit: a token that has no rival is not certain to be accepted."""


class Shortlist(NamedTuple):
    """The tokens that compete for each slot, best first.

    Attributes:
        columns: [bs, gamma, k] int64, of the base logits.
        logits: [bs, gamma, k], base logits.
        competing: [bs, gamma, k], or one more with candidates: the columns, and that of the candidate of the text if it
            weighs anything, wherever it ranks; else the best one again.
    """

    columns: torch.Tensor
    logits: torch.Tensor
    competing: torch.Tensor

    @staticmethod
    def of(
        base_logits: torch.Tensor,  # [bs, gamma, v]
        heads: DraftHeads,
        candidates: Candidates | None = None,
    ) -> Shortlist | None:
        """Return the tokens that compete in a walk; None if all do. No host sync."""
        if heads.shortlist is None:
            return None
        logits, columns = base_logits.topk(min(heads.shortlist, base_logits.shape[-1]))
        competing = columns
        if candidates is not None:
            _, nats, offered = candidates.offers(base_logits.shape[1], heads.vocabulary)
            competes = ((offered >= 0) & (nats > 0))[..., None]
            competing = torch.cat((columns, torch.where(competes, offered[..., None], columns[..., :1])), -1)
        return Shortlist(columns, logits, competing)

    def masked(self, base_logits: torch.Tensor) -> torch.Tensor:
        """Return base logits [bs, gamma, v], -inf where no token competes."""
        kept = torch.full_like(base_logits, float("-inf"))
        return kept.scatter_(-1, self.competing, base_logits.gather(-1, self.competing))

    def confidence(
        self,
        hidden: torch.Tensor,  # [bs, gamma, d]
        anchors: torch.Tensor,  # [bs] int64
        tokens: torch.Tensor,  # [bs, gamma] int64
        heads: DraftHeads,
        candidates: Candidates | None = None,
    ) -> torch.Tensor:
        """Return [bs, gamma] float32 log odds of each slot's likeliest token by the head itself, at temperature 1.

        Of a greedy request that is the draft. Of a sampled one it must not be: what decides whether a draft is verified
        may depend on the drafts before it, and not on the draft.
        """
        markov = heads.markov
        assert markov is not None, "a drafter with a shortlist has a head that chooses from it"
        latents = F.embedding(torch.cat((anchors[:, None], tokens[:, :-1]), dim=1), markov.w1)
        if markov.head is not None:
            latents, _ = markov.head.latent(latents, hidden, None)
        biases = torch.einsum("bgr,bgkr->bgk", latents.float(), markov.w2[self.columns].float())
        scores, _ = (self.logits.float() + biases).sort(-1, descending=True)
        logits = (scores[..., 0] - scores[..., 1:].logsumexp(-1)).clamp(-_CERTAIN, _CERTAIN)
        return logits if candidates is None else candidates.sure(logits)
