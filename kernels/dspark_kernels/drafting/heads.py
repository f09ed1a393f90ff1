"""The heads of a drafter that propose tokens from its hidden states, as tensors over the tokens that it proposes."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Protocol

import torch
import torch.nn.functional as F

from dspark_kernels.drafting.int8_linear import Weight, in_its_dtype, linear


class LatentHead(Protocol):
    """A sequential head whose latent u is more than the last token's embedding (gated, rnn)."""

    def initial_state(self, bs: int, device: torch.device, dtype: torch.dtype) -> torch.Tensor | None: ...

    def latent(
        self,
        w1_embedding: torch.Tensor,  # [bs, r]
        hidden: torch.Tensor,  # [bs, d]
        state: torch.Tensor | None,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:  # u [bs, r], next state
        ...


@dataclass(frozen=True)
class MarkovWeights:
    """A Markov head: the bias ``W2 u`` of a slot given the token before it, with u formed from ``W1[token]``.

    Attributes:
        w1: [V, r], contiguous.
        w2: [v, r] of the same dtype, contiguous, or in eight bits; a row per column of the draft logits.
        head: forms the latent; None if that is the embedding itself (vanilla), or the embedding times ``projection``.
        projection: P [r, d] of a selector, whose latent is ``(P h) * W1[token]``; None for other heads.
    """

    w1: torch.Tensor
    w2: Weight
    head: LatentHead | None = None
    projection: torch.Tensor | None = None


@dataclass(frozen=True)
class ConfidenceWeights:
    """The confidence head's parameters.

    Attributes:
        weight: [d + r], or [d] for a head that does not read Markov embeddings; any float dtype, contiguous.
        bias: [1].
    """

    weight: torch.Tensor
    bias: torch.Tensor


@dataclass(frozen=True)
class DraftVocabulary:
    """The tokens that a drafter proposes, if these are not all.

    Attributes:
        token_ids: [v] int64: column i of the draft logits is token ``token_ids[i]``.
        vocab_size: V.
    """

    token_ids: torch.Tensor
    vocab_size: int

    @cached_property
    def columns(self) -> torch.Tensor:
        """[V] int32: the column of every token, -1 where it has none. Read it once before capturing a CUDA graph."""
        columns = self.token_ids.new_full((self.vocab_size,), -1, dtype=torch.int32)
        columns[self.token_ids] = torch.arange(len(self.token_ids), dtype=torch.int32, device=columns.device)
        return columns

    def spread(self, logits: torch.Tensor) -> torch.Tensor:
        """[n, v] -> [n, V], minus infinity for the tokens that are not proposed."""
        whole = logits.new_full((logits.shape[0], self.vocab_size), float("-inf"))
        whole[:, self.token_ids] = logits
        return whole


@dataclass(frozen=True)
class DraftHeads:
    """The weights that turn base logits into a block of tokens; each part is None if the drafter has none.

    Attributes:
        markov: corrects the logits of a slot by the token before it.
        confidence: says how likely a draft is accepted.
        vocabulary: the tokens that the columns of the draft logits stand for; None = all, in order.
        shortlist: number of tokens that compete for a slot, the best of the base logits; None = all. The Markov head,
            a selector, says how likely a draft is accepted, too, if there is no other confidence.
    """

    markov: MarkovWeights | None = None
    confidence: ConfidenceWeights | None = None
    vocabulary: DraftVocabulary | None = None
    shortlist: int | None = None

    @property
    def w1(self) -> torch.Tensor | None:
        """[V, r] Markov embeddings."""
        return None if self.markov is None else self.markov.w1


class MarkovWalk:
    """A Markov head on its way through the blocks of a batch, slot by slot: what it remembers of the slots before.

    Args:
        markov: the head.
        hidden: [bs, gamma, d] post-norm hidden states, which all heads but vanilla ones read.
    """

    def __init__(self, markov: MarkovWeights, hidden: torch.Tensor) -> None:
        self._markov, self._hidden = markov, hidden
        self._slot, self._state = 0, None
        self._factors = None if markov.projection is None else F.linear(hidden, markov.projection)
        if markov.head is not None:
            self._state = markov.head.initial_state(hidden.shape[0], hidden.device, hidden.dtype)

    def latent(self, previous: torch.Tensor) -> torch.Tensor:
        """U [bs, r] of the next slot, after the tokens ``previous`` [bs] int64."""
        embedding = F.embedding(previous, self._markov.w1)
        slot, self._slot = self._slot, self._slot + 1
        if self._factors is not None:
            return self._factors[:, slot] * embedding
        if self._markov.head is None:
            return embedding
        latent, self._state = self._markov.head.latent(embedding, self._hidden[:, slot], self._state)
        return latent

    def corrected(
        self, previous: torch.Tensor, base_logits: torch.Tensor, competing: torch.Tensor | None
    ) -> torch.Tensor:
        """Return [bs, v] float32 ``base_logits`` of the next slot with their bias, whatever the weights' dtype.

        Args:
            competing: [bs, k] int64 columns, apart from which all get -inf; None for all.
        """
        latent = self.latent(previous)
        if competing is None:
            return base_logits.float() + linear(latent, self._markov.w2)
        bias = torch.einsum("br,bkr->bk", latent, in_its_dtype(self._markov.w2)[competing])
        scores = base_logits.gather(1, competing).float() + bias
        return torch.full_like(base_logits, float("-inf"), dtype=scores.dtype).scatter_(1, competing, scores)
