"""Drafting from a part of the vocabulary: the tokens that the target really uses in its text.

The product with the LM head is most of a small drafter's work, and most of its rows are tokens that hardly ever occur.
Proposals may come from any set of tokens: verification is exact for every law the drafts are drawn from, and a token
outside the set is simply never proposed. The set lies beside the checkpoint, in ``draft_vocabulary.json``::

    {"version": 1, "token_ids": [0, 2, 3, ...]}

The drafter may have heads for the whole vocabulary still: loaders that do not know the file then draft from all of it.
Or it was trained for these tokens alone and has no other rows (``draft_vocab_size``).
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Annotated, Literal

import pydantic
import torch
import torch.nn.functional as F
from dspark_kernels import ConfidenceWeights, DraftVocabulary, MarkovWeights, WalkWeights
from torch import Tensor

from sglang_dspark.draft.checked import Index, check
from sglang_dspark.draft.confidence_head import ConfidenceHead
from sglang_dspark.draft.markov_head import MarkovHead, VanillaMarkovHead
from sglang_dspark.draft.model import DraftModel
from sglang_dspark.errors import CheckpointError

FILE = "draft_vocabulary.json"
VERSION = 1
_REMEDY = "remove the file to draft from all tokens, or take the checkpoint's own"


@dataclass(frozen=True)
class _Vocabulary:
    """The content of the file."""

    version: Literal[1]
    token_ids: Annotated[list[Index], pydantic.Field(min_length=1)]


def load_token_ids(folder: str | Path, vocab_size: int) -> list[int] | None:
    """Token ids that the drafter in ``folder`` proposes, ascending; None without the file.

    Raises:
        CheckpointError: the file is damaged or does not belong to a vocabulary of this size.
    """
    path = Path(folder) / FILE
    if not path.is_file():
        return None
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path}: cannot be read ({error!r}); {_REMEDY}") from error
    if not isinstance(content, dict):
        raise CheckpointError(f"{path}: holds a {type(content).__name__}, not an object; {_REMEDY}")
    check(_Vocabulary, content, origin=str(path), remedy=_REMEDY)
    ids: list[int] = content["token_ids"]
    if any(later <= earlier for earlier, later in pairwise(ids)) or ids[-1] >= vocab_size:
        raise CheckpointError(f"{path}: token_ids must ascend within [0, {vocab_size - 1}], without repeats; {_REMEDY}")
    return ids


def save_token_ids(folder: str | Path, token_ids: Sequence[int]) -> None:
    """Write the file of :func:`load_token_ids`."""
    content = {"version": VERSION, "token_ids": sorted(token_ids)}
    (Path(folder) / FILE).write_text(json.dumps(content) + "\n", encoding="utf-8")


class ProposalHeads:
    """LM head and Markov head of a frozen drafter, over the tokens that it proposes.

    Attributes:
        vocabulary: these tokens; None stands for all.
        markov: the Markov head over them; None without one.
        weights: the tensors of the Markov and the confidence head that the kernels read, for the same tokens.
    """

    def __init__(self, model: DraftModel, token_ids: Sequence[int] | None) -> None:
        """Take the heads of ``model``, whose LM head is bound.

        Args:
            token_ids: ascending; None proposes all tokens that the model has heads for. A model with a reduced
                vocabulary of its own proposes that.
        """
        self.vocabulary: DraftVocabulary | None = None
        self.markov: MarkovHead | _ReducedMarkovHead | None = model.markov_head
        self._rows = model.lm_head_weight
        w2 = None if model.markov_head is None else model.markov_head.markov_w2.weight
        if model.token_ids is not None:
            self.vocabulary = DraftVocabulary(model.token_ids, model.config.vocab_size)
        elif token_ids is not None:
            ids = torch.tensor(token_ids, device=model.lm_head_weight.device)
            self.vocabulary = DraftVocabulary(ids, model.config.vocab_size)
            self._rows = model.lm_head_weight[ids]
            if model.markov_head is not None:
                self.markov = _ReducedMarkovHead(model.markov_head, ids)
                w2 = self.markov.w2
        self.weights = WalkWeights(_markov_weights(model.markov_head, w2), _confidence_weights(model.confidence_head))

    def base_logits(self, hidden: Tensor) -> Tensor:
        """``hidden [T, d]`` (post-norm) -> logits ``[T, v]`` before the Markov bias, in the LM head's dtype."""
        return F.linear(hidden.to(self._rows.dtype), self._rows)


def _markov_weights(head: MarkovHead | None, w2: Tensor | None) -> MarkovWeights | None:
    if head is None or w2 is None:
        return None
    return MarkovWeights(head.markov_w1.weight, w2, None if isinstance(head, VanillaMarkovHead) else head)


def _confidence_weights(head: ConfidenceHead | None) -> ConfidenceWeights | None:
    return None if head is None else ConfidenceWeights(head.proj.weight[0], head.proj.bias)


class _ReducedMarkovHead:
    """A Markov head whose bias covers some tokens only; what it remembers of the last token covers all."""

    def __init__(self, head: MarkovHead, ids: Tensor) -> None:
        self._head = head
        self.w2 = head.markov_w2.weight[ids]

    def initial_state(self, bs: int, device: torch.device, dtype: torch.dtype) -> Tensor | None:
        return self._head.initial_state(bs, device, dtype)

    def step(self, prev_tokens: Tensor, hidden: Tensor, state: Tensor | None) -> tuple[Tensor, Tensor, Tensor | None]:
        """As :meth:`MarkovHead.step`, with a bias ``[bs, v]``; ``prev_tokens`` are ids of the whole vocabulary."""
        w1_embedding = self._head.markov_w1(prev_tokens)
        latent, new_state = self._head.latent(w1_embedding, hidden, state)
        return F.linear(latent, self.w2), w1_embedding, new_state
