"""The rest of a label as soon as its first token is there (preset ``classification``)."""

from __future__ import annotations

from collections.abc import Sequence

Tokens = tuple[int, ...]

ROOT = 0


class LabelTrie:
    """All beginnings of labels, which requests with the same labels share.

    Beginnings are numbered, :data:`ROOT` being the empty one. Each knows the longest one that its own end is, so that
    a text is followed at constant cost per token (Aho and Corasick, 1975).

    Args:
        labels: tokens of every spelling of every label; of labels that begin alike, the first one is proposed.
    """

    def __init__(self, labels: Sequence[Tokens]) -> None:
        self._longer: dict[tuple[int, int], int] = {}  # by beginning and next token
        self._first: list[tuple[Tokens, int]] = [((), 0)]  # label and length
        for label in labels:
            beginning = ROOT
            for length, token in enumerate(label[:-1], start=1):
                beginning = self._longer.setdefault((beginning, token), len(self._first))
                if beginning == len(self._first):
                    self._first.append((label, length))
        self._at_its_end = [ROOT] * len(self._first)
        # The short ones first: those of the long ones are found through them.
        for (shorter, token), beginning in sorted(self._longer.items(), key=lambda item: self._first[item[1]][1]):
            if shorter != ROOT:
                self._at_its_end[beginning] = self.follow(self._at_its_end[shorter], token)

    def follow(self, beginning: int, token: int) -> int:
        """Return the longest beginning at the end of a text that ended with ``beginning`` before ``token``."""
        while (longer := self._longer.get((beginning, token))) is None:
            if beginning == ROOT:
                return ROOT
            beginning = self._at_its_end[beginning]
        return longer

    def rest(self, beginning: int) -> Tokens:
        """Return what is left of the first label with this beginning."""
        label, length = self._first[beginning]
        return label[length:]


class CandidateLabels:
    """Recognises the beginning of a label at the end of one request's output.

    Args:
        trie: of the labels.
    """

    def __init__(self, trie: LabelTrie) -> None:
        self._trie = trie
        self._beginning = ROOT

    def prepare(self, most: int) -> int:
        """Nothing is left to be done."""
        return 0

    def extend(self, tokens: Sequence[int]) -> None:
        """Append committed tokens of the output; those of the prompt begin no label."""
        for token in tokens:
            self._beginning = self._trie.follow(self._beginning, token)

    def propose(self, most: int) -> list[int]:
        """Return up to ``most`` tokens of the rest of the label whose longest beginning the output ends with."""
        return list(self._trie.rest(self._beginning)[:most])


def spellings(label: str) -> list[str]:
    """Return a label as it stands, and after a space, as it is tokenised behind other text."""
    return [label] if label[0].isspace() else [label, f" {label}"]
