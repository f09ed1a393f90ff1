"""The part of the vocabulary that one training step computes its distributions over.

With a small model the product with the LM head and the passes over ``[slots, V]`` logits cost more than the drafter.
The tokens that the target uses in its own text are few, so a step may use those, plus a random sample of all others
that stands for the whole rest: each sampled token's logit is raised by ``log(num_others / num_sampled)``, which makes
the softmax normaliser an unbiased estimate of the full one. Without the sample nothing would hold down the logits of
the tokens left out, and the drafter would propose them.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from dspark_kernels import to_device
from torch import Tensor

from sglang_dspark.errors import ConfigError


@dataclass(frozen=True)
class VocabularySlice:
    """The tokens of one step."""

    ids: Tensor | None  # [v] int64 token ids; None = the whole vocabulary in order
    log_weight: Tensor | None  # [v] float32 added to the logits; None = zeros
    index: Tensor | None  # [V] int64 position of each token in `ids`, -1 = not in the slice; None = identity

    def rows(self, weight: Tensor) -> Tensor:
        """Return the slice's rows ``[v, ...]`` of a per-token tensor ``[V, ...]``."""
        return weight if self.ids is None else weight[self.ids]

    def locate(self, tokens: Tensor) -> Tensor:
        """Return the positions of `tokens` in the slice, -1 where absent."""
        return tokens if self.index is None else self.index[tokens]


class LossVocabulary:
    """Draws a `VocabularySlice` per step: the `num_kept` most frequent tokens and `num_sampled` of the others.

    Args:
        counts: ``[V]`` how often each token occurs in the answers of the corpus.
        num_kept: 0 = the whole vocabulary, and nothing is sampled.
        num_sampled: tokens sampled per step.
    """

    def __init__(self, counts: Tensor, num_kept: int, num_sampled: int) -> None:
        vocab_size = len(counts)
        self._kept: Tensor | None = None
        if num_kept:
            if num_sampled < 1 or num_kept + num_sampled > vocab_size:
                raise ConfigError(
                    f"loss_vocab={num_kept} with loss_vocab_sampled={num_sampled} does not fit a vocabulary of "
                    f"{vocab_size}; sample at least 1, or set loss_vocab=0 for the whole vocabulary"
                )
            order = counts.argsort(descending=True, stable=True)
            self._kept, self._others = order[:num_kept], order[num_kept:]
            self._num_sampled = num_sampled
            self._vocab_size = vocab_size

    def draw(self, generator: torch.Generator, device: torch.device) -> VocabularySlice:
        """Draw the slice of the next step, on `device`; `generator` lives on the CPU."""
        if self._kept is None:
            return VocabularySlice(None, None, None)
        chosen = torch.randperm(len(self._others), generator=generator)[: self._num_sampled]
        ids = to_device(torch.cat([self._kept, self._others[chosen]]), device)
        log_weight = torch.zeros(len(ids), device=device)
        log_weight[len(self._kept) :] = math.log(len(self._others) / self._num_sampled)
        index = torch.full((self._vocab_size,), -1, device=device)
        index.index_copy_(0, ids, torch.arange(len(ids), device=device))
        return VocabularySlice(ids, log_weight, index)
