"""Drafting from a part of the vocabulary: the tokens that the target really uses in its text.

The product with the LM head is most of a small drafter's work, and most of its rows are tokens that hardly ever occur.
Proposals may come from any set of tokens: verification is exact for every distribution the drafts are drawn from, and a
token outside the set is simply never proposed. The set lies next to the checkpoint, in ``draft_vocabulary.json``, or
where the operator says::

    {"version": 1, "token_ids": [0, 2, 3, ...]}

The drafter may have heads for the whole vocabulary still: loaders that do not know the file then draft from all of it.
Or it was trained only for these tokens and has no other rows (``draft_vocab_size``).

The command ``vocabulary`` chooses the tokens by what answers consist of.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal, Self

import msgspec
import numpy as np
import torch
from dspark_kernels import ConfidenceWeights, DraftHeads, DraftVocabulary, MarkovWeights, Weight
from numpy.typing import NDArray
from torch import Tensor

from sglang_dspark.draft.frozen_layers import in_eight_bits, linear_layer, overwrite
from sglang_dspark.draft.heads import MarkovHead, SelectorMarkovHead
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
        vocabulary: the tokens that are proposed; None stands for all.
        lm_head: rows of the proposed tokens.
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
        self.vocabulary = None if ids is None else DraftVocabulary(ids, model.config.vocab_size)
        self._model, self._chosen = model, chosen
        if ids is not None:
            self.proposed = np.zeros(model.config.vocab_size + 1, bool)
        markov = markov_weights(model.markov_head, self._stored)
        self.lm_head = linear_layer(self._stored(model.lm_head_weight))
        head = model.confidence_head
        confidence = None if head is None else ConfidenceWeights(head.proj.weight[0], head.proj.bias)
        self.weights = DraftHeads(markov, confidence, self.vocabulary, model.config.selector_top_k)
        self._follow_list()

    def follow(self) -> None:
        """Derive in place all that is computed of the model's weights and of the list of tokens, which have changed."""
        self._follow_list()
        if self._chosen is None and not self._model.eight_bits:
            return
        overwrite(self.lm_head.weight, self._stored(self._model.lm_head_weight))
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

    def base_logits(self, hidden: Tensor) -> Tensor:
        """Return logits ``[T, v]`` of ``hidden [T, d]`` (post-norm) before the Markov bias, in the LM head's dtype."""
        return base_logits(hidden, self.lm_head, self._model.config)


def markov_weights(head: MarkovHead | None, stored: Callable[[Tensor], Weight]) -> MarkovWeights | None:
    """Return the head's weights: biases cover the proposed tokens only, embeddings of the last token cover all."""
    if head is None:
        return None
    w2 = stored(head.markov_w2.weight)
    if isinstance(head, SelectorMarkovHead):
        return MarkovWeights(head.markov_w1.weight, w2, projection=head.hidden_projection.weight)
    return MarkovWeights(head.markov_w1.weight, w2, None if type(head) is MarkovHead else head)


_BYTE = re.compile("<0x[0-9A-F]{2}>")
_HELD_OUT = 10

Ids = Sequence[int]
"""Token ids of a text."""


@dataclass(frozen=True)
class Tokens:
    """The tokens of a target.

    Attributes:
        number: of the tokenizer's; the ids below are its tokens, in the order of their frequency if it is of BPE.
        special: tokens that are no text: ends, and those of the chat template. They are proposed whatever is counted.
        of_bytes: tokens of single bytes, by which any text can be written.
    """

    number: int
    special: frozenset[int]
    of_bytes: frozenset[int]

    @classmethod
    def of(cls, tokenizer: Any, target: str | Path) -> Self:
        """Read them.

        Args:
            tokenizer: of transformers.
            target: its checkpoint, whose configurations name the tokens that end an answer.
        """
        from tokenizers.pre_tokenizers import ByteLevel
        from transformers import AutoConfig, GenerationConfig

        config = AutoConfig.from_pretrained(target)
        ends = [tokenizer.eos_token_id, getattr(config.get_text_config(), "eos_token_id", None)]
        if (Path(target) / "generation_config.json").is_file():
            ends.append(GenerationConfig.from_pretrained(target).eos_token_id)
        template = str(tokenizer.chat_template or "")
        written = {index for index, token in tokenizer.added_tokens_decoder.items() if token.content in template}
        alphabet = set(ByteLevel.alphabet())
        of_bytes = {
            index for token, index in tokenizer.get_vocab().items() if token in alphabet or _BYTE.fullmatch(token)
        }
        number = min(len(tokenizer), config.get_text_config().vocab_size)
        special = written.union(tokenizer.all_special_ids, *map(_listed, ends))
        return cls(number, *(frozenset(token for token in ids if token < number) for ids in (special, of_bytes)))


def _listed(ids: int | Sequence[int] | None) -> Sequence[int]:
    return () if ids is None else ids if isinstance(ids, Sequence) else (ids,)


@dataclass(frozen=True)
class Traffic:
    """Texts by their tokens.

    Attributes:
        answers: what the target says.
        prompts: what users say: answers repeat their words.
    """

    answers: Sequence[Ids]
    prompts: Sequence[Ids] = ()

    def choose(self, tokens: Tokens, size: int) -> list[int]:
        """Return ``size`` ids, ascending.

        Special tokens come first, then those of answers, those only of prompts, each by their number, single bytes,
        and the others in the tokenizer's order.
        """
        said, asked = _counted(self.answers), _counted(self.prompts)
        ranked = sorted(
            range(tokens.number),
            key=lambda token: (
                token not in tokens.special,
                -said[token],
                -asked[token],
                token not in tokens.of_bytes,
                token,
            ),
        )
        return sorted(ranked[:size])

    def held_out_coverage(self, tokens: Tokens, size: int) -> float | None:
        """Return the share of every tenth answer's tokens that a list from all else contains; None of a few answers."""
        held_out = self.answers[_HELD_OUT - 1 :: _HELD_OUT]
        if not held_out:
            return None
        others = [ids for place, ids in enumerate(self.answers) if place % _HELD_OUT != _HELD_OUT - 1]
        return coverage(replace(self, answers=others).choose(tokens, size), held_out)


def coverage(proposed: Collection[int], texts: Iterable[Ids]) -> float | None:
    """Return the share of the texts' tokens that are proposed; None without any token."""
    counts, proposed = _counted(texts), frozenset(proposed)
    total = counts.total()
    return sum(number for token, number in counts.items() if token in proposed) / total if total else None


def _counted(texts: Iterable[Ids]) -> Counter[int]:
    return Counter(token for ids in texts for token in ids)
