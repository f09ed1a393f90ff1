"""Choose the tokens that a drafter proposes by what answers consist of."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Self

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

        Special tokens come first, then those of answers, those of prompts alone, each by their number, single bytes,
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
