"""What a walk reads and makes: weights of the heads, candidates, the drafted block and its distribution.

Candidates compete with the drafter's own tokens in the walk through a block. Slot k is drawn from softmax(score + b
[token = a_k]) while the drafts before it are a_0 .. a_(k-1), and as the drafter says after the first one that is not.
b and a_k were fixed before the block was drawn, and whether they count at slot k before its own draft was. The
distribution that is stored is the raised one, so verification is the same as without candidates.

The distribution that drafts were drawn from is kept as scores and normalisers instead of probabilities. Verification
looks at a few tokens per slot and at one whole row per rejected request. Scores let it read just those, and spare
drafting the second pass over the vocabulary that normalised probabilities would cost.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache, cached_property
from typing import Any, Protocol, TypeVar

import torch
import torch.nn.functional as F

from dspark_kernels.drafting.layers import Weight, in_its_dtype, linear
from dspark_kernels.sampling import SamplingBatch


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
        """Return [V] int32: the column of each token, -1 if it has none. Read it before capturing a CUDA graph."""
        columns = self.token_ids.new_full((self.vocab_size,), -1, dtype=torch.int32)
        columns[self.token_ids] = torch.arange(len(self.token_ids), dtype=torch.int32, device=columns.device)
        return columns

    def spread(self, logits: torch.Tensor) -> torch.Tensor:
        """Spread [n, v] to [n, V], minus infinity for the tokens that are not proposed."""
        whole = logits.new_full((logits.shape[0], self.vocab_size), float("-inf"))
        whole[:, self.token_ids] = logits
        return whole


@dataclass(frozen=True)
class DraftHeads:
    """The weights that turn base logits into a block of tokens; each part is None if the drafter has none.

    Attributes:
        markov: corrects the logits of a slot for the token before it.
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
        """Return [V, r] Markov embeddings."""
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
        """Return U [bs, r] of the next slot, after the tokens ``previous`` [bs] int64."""
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
LEAST_COLUMN, MOST_COLUMN, LENGTH_COLUMN, ROW_COLUMN = range(4)
"""Columns of :attr:`ChainRules.bounds`."""
USUAL = (LEAST_MATCH, MOST_MATCH, 1 << 30, 0)
"""Bounds of a request that asks for nothing."""


@dataclass(frozen=True)
class SecondTexts:
    """Hold texts in which the ends of requests' own are looked up as well, one text after the other.

    Attributes:
        tokens: [L] int64, -1 before each part of a text and after the last.
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

    def joined(self, other: SecondTexts | None) -> SecondTexts:
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
        second: in addition to the requests' own texts; None if no request has one.
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
        """Return [bs, gamma, V] float32: the distribution written out. For tests; no host sync."""
        return self._written(self.scores, self.log_norms)

    def _written(self, scores: torch.Tensor, log_norms: torch.Tensor) -> torch.Tensor:
        proposed = torch.exp(scores - log_norms[..., None])
        if self.columns is None:
            return proposed
        return proposed[..., self.columns.clamp_min(0).long()].masked_fill_(self.columns < 0, 0.0)

    def spread(self, index: torch.Tensor, bs: int) -> DraftDistribution:
        """Return these rows as the requests ``index`` [m] int64 of a batch of ``bs``; the others are padding."""
        scores, log_norms = (
            part.new_zeros((bs, *part.shape[1:])).index_copy_(0, index, part) for part in (self.scores, self.log_norms)
        )
        return DraftDistribution(scores, log_norms, self.columns)

    def first(self, bs: int) -> DraftDistribution:
        """Return the distribution of the first ``bs`` requests; no copy."""
        return DraftDistribution(self.scores[:bs], self.log_norms[:bs], self.columns)


_NEVER = -30.0
"""Confidence logit of a candidate that its chain does not reach."""


@dataclass(frozen=True)
class DraftBlock:
    """A drafted block.

    ``distribution`` and ``copied`` may have fewer slots, the first ``drawn`` of gamma: the tokens after those were
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
        """Return blocks without drafts, as non-speculative steps have them."""
        return DraftBlock(torch.empty((bs, 0), dtype=torch.int64, device=device))

    @staticmethod
    def of_chains(chains: torch.Tensor, depth: int) -> DraftBlock:
        """Return blocks of only the candidates that requests have asked for; confidence logits say if there are any."""
        rows, _, candidates = Candidates.parts(chains)
        candidates = candidates[:, :depth]
        is_there = ((candidates >= 0) & (rows[:, None] >= ASKED_ROWS)).cumprod(1)
        chains[:, FOLLOWED] = is_there.sum(1)
        copied = torch.ones_like(is_there, dtype=torch.bool)
        return DraftBlock(candidates.clamp_min(0), 60.0 * is_there - 30.0, copied=copied, chains=chains)

    def spread(self, index: torch.Tensor, bs: int) -> DraftBlock:
        """Return a batch of ``bs`` requests in which ``index`` [m] int64 have these blocks; the others are padding."""

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
        """Return blocks of up to ``depth`` slots, whose slots after this walk's are copied candidates.

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
