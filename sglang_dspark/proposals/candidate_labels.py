"""The rest of a label as soon as its first token is there (preset ``classification``)."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

Tokens = tuple[int, ...]

_SEPARATOR = -1


class CandidateLabels:
    """Recognises the beginning of a label at the end of the output.

    Args:
        labels: tokens of every spelling of every label; of labels that begin alike, the first one is proposed.
    """

    def __init__(self, labels: Iterable[Tokens]) -> None:
        self._root = _Node()
        self._longest = 0  # tokens of a beginning, which lacks at least the last one
        for label in labels:
            node = self._root
            for place, token in enumerate(label[:-1], start=1):
                node = node.following.setdefault(token, _Node(label, place))
            self._longest = max(self._longest, len(label) - 1)
        self._tail: list[int] = []

    def extend(self, tokens: Sequence[int]) -> None:
        """Append committed tokens of the output; those of the prompt begin no label."""
        self._tail = [*self._tail, *tokens][-self._longest :] if self._longest else []

    def propose(self, most: int) -> list[int]:
        """Up to ``most`` tokens of the rest of the label whose longest beginning the output ends with."""
        for start in range(len(self._tail)):
            node = self._find(self._tail[start:])
            if node is not None:
                return list(node.label[node.place : node.place + most])
        return []

    def _find(self, beginning: Sequence[int]) -> _Node | None:
        node = self._root
        for token in beginning:
            if token not in node.following:
                return None
            node = node.following[token]
        return node


@dataclass
class _Node:
    """A beginning: the first ``place`` tokens of ``label``; ``following`` are the longer ones by their next token."""

    label: Tokens = ()
    place: int = 0
    following: dict[int, _Node] = field(default_factory=dict)


def spellings(label: str, encode: Callable[[str], Sequence[int]]) -> list[Tokens]:
    """Tokens of a label as it stands, and after a space where that makes another token.

    Args:
        encode: text to tokens, without special tokens.
    """
    texts = [label] if label[0].isspace() else [label, f" {label}"]
    return list(dict.fromkeys(tuple(encode(text)) for text in texts))


def join_labels(labels: Iterable[Tokens]) -> list[int]:
    """The labels as one flat list."""
    return [token for label in labels for token in (*label, _SEPARATOR)]


def split_labels(joined: Sequence[int]) -> list[Tokens]:
    """The inverse of :func:`join_labels`."""
    labels, start = [], 0
    for end, token in enumerate(joined):
        if token == _SEPARATOR:
            labels.append(tuple(joined[start:end]))
            start = end + 1
    return labels
