"""Drafting from a part of the vocabulary: the tokens that the target really uses in its text.

The product with the LM head is most of a small drafter's work, and most of its rows are tokens that hardly ever occur.
Proposals may come from any set of tokens: verification is exact for every distribution the drafts are drawn from, and a
token outside the set is simply never proposed. The set lies beside the checkpoint, in ``draft_vocabulary.json``, or
where the operator says::

    {"version": 1, "token_ids": [0, 2, 3, ...]}

The drafter may have heads for the whole vocabulary still: loaders that do not know the file then draft from all of it.
Or it was trained for these tokens alone and has no other rows (``draft_vocab_size``).
"""

import json
from collections.abc import Callable, Iterable, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Literal

import msgspec
import numpy as np
import torch
from dspark_kernels import ConfidenceWeights, DraftHeads, DraftVocabulary, MarkovWeights, Weight
from numpy.typing import NDArray
from torch import Tensor

from sglang_dspark.draft.frozen_layers import in_eight_bits, overwrite
from sglang_dspark.draft.heads import MarkovHead, SelectorMarkovHead, VanillaMarkovHead
from sglang_dspark.draft.model import DraftModel, base_logits
from sglang_dspark.errors import CheckpointError
from sglang_dspark.files import atomic_write_text

FILE = "draft_vocabulary.json"
VERSION = 1
_REMEDY = "write it with `sglang-dspark vocabulary`, or do without it to draft from all tokens"


class _Vocabulary(msgspec.Struct):
    """The content of the file."""

    version: Literal[1]
    token_ids: list[int]


def load_token_ids(folder: str | Path, vocab_size: int) -> list[int] | None:
    """Return the token ids that the drafter in ``folder`` proposes, ascending; None without the file.

    Raises:
        CheckpointError: the file is damaged or does not belong to a vocabulary of this size.
    """
    path = Path(folder) / FILE
    return read_token_ids(path, vocab_size) if path.is_file() else None


def read_token_ids(path: Path, vocab_size: int) -> list[int]:
    """Return the token ids of a file, as :func:`load_token_ids` does."""
    try:
        ids = msgspec.json.decode(path.read_bytes(), type=_Vocabulary).token_ids
    except (OSError, msgspec.MsgspecError) as error:
        raise CheckpointError(f"{path}: {error}; {_REMEDY}") from error
    if not ids or ids[0] < 0 or ids[-1] >= vocab_size or any(later <= earlier for earlier, later in pairwise(ids)):
        raise CheckpointError(f"{path}: token_ids must ascend within [0, {vocab_size - 1}], without repeats; {_REMEDY}")
    return ids


def save_token_ids(path: Path, token_ids: Iterable[int]) -> None:
    """Write the file of :func:`read_token_ids`."""
    atomic_write_text(path, json.dumps({"version": VERSION, "token_ids": sorted(token_ids)}) + "\n")


class ProposalHeads:
    """LM head, Markov head and confidence head of a frozen drafter, over the tokens that it proposes.

    Rows of LM head and Markov biases are stored as the weights of its layers are.

    Attributes:
        weights: all but the LM head.
        proposed: [V + 1] whether a token is proposed, and True, for the -1 after a request's tokens; None for all.
    """

    proposed: NDArray[np.bool_] | None = None

    def __init__(self, model: DraftModel, token_ids: Sequence[int] | None) -> None:
        """Take the heads of ``model``, whose LM head is bound.

        Args:
            token_ids: ascending; None proposes all tokens that the model has heads for. A model with a reduced
                vocabulary of its own proposes that.
        """
        # Rows of heads that cover more than is proposed.
        chosen = None
        if model.token_ids is None and token_ids is not None:
            chosen = torch.tensor(token_ids, device=model.lm_head_weight.device)
        ids = model.token_ids if chosen is None else chosen
        vocabulary = None if ids is None else DraftVocabulary(ids, model.config.vocab_size)
        self._model, self._chosen = model, chosen
        if ids is not None:
            self.proposed = np.zeros(model.config.vocab_size + 1, bool)
        markov = _markov_weights(model.markov_head, self._stored)
        self._rows = self._stored(model.lm_head_weight)
        head = model.confidence_head
        confidence = None if head is None else ConfidenceWeights(head.proj.weight[0], head.proj.bias)
        self.weights = DraftHeads(markov, confidence, vocabulary, model.config.selector_top_k)
        self._follow_list()

    def follow(self) -> None:
        """Derive in place all that is computed of the model's weights and of the list of tokens, which have changed."""
        self._follow_list()
        if self._chosen is None and not self._model.eight_bits:
            return
        overwrite(self._rows, self._stored(self._model.lm_head_weight))
        if self.weights.markov is not None and self._model.markov_head is not None:
            overwrite(self.weights.markov.w2, self._stored(self._model.markov_head.markov_w2.weight))

    def _follow_list(self) -> None:
        vocabulary, proposed = self.vocabulary, self.proposed
        if vocabulary is not None and proposed is not None:
            vocabulary.columns.copy_(DraftVocabulary(vocabulary.token_ids, vocabulary.vocab_size).columns)
            proposed[:] = False
            proposed[[*vocabulary.token_ids.tolist(), -1]] = True

    @property
    def has_others(self) -> bool:
        """Return whether there are heads for tokens that are not proposed."""
        return self._chosen is not None

    def _stored(self, weight: Tensor) -> Weight:
        """Return the rows of a weight that are proposed, as they are read."""
        rows = weight if self._chosen is None else weight[self._chosen]
        return in_eight_bits(rows) if self._model.eight_bits else rows

    @property
    def vocabulary(self) -> DraftVocabulary | None:
        """Return the tokens that are proposed; None stands for all."""
        return self.weights.vocabulary

    def base_logits(self, hidden: Tensor) -> Tensor:
        """Return logits ``[T, v]`` of ``hidden [T, d]`` (post-norm) before the Markov bias, in the LM head's dtype."""
        return base_logits(hidden, self._rows, self._model.config)


def _markov_weights(head: MarkovHead | None, stored: Callable[[Tensor], Weight]) -> MarkovWeights | None:
    """Return the head's weights: biases cover the proposed tokens only, embeddings of the last token cover all."""
    if head is None:
        return None
    w2 = stored(head.markov_w2.weight)
    if isinstance(head, SelectorMarkovHead):
        return MarkovWeights(head.markov_w1.weight, w2, projection=head.hidden_projection.weight)
    return MarkovWeights(head.markov_w1.weight, w2, None if isinstance(head, VanillaMarkovHead) else head)
