"""The rest of a label as soon as its first token is there (preset ``classification``)."""

from __future__ import annotations

from collections.abc import Sequence

Tokens = tuple[int, ...]

ROOT = 0


class LabelTrie:
    """All prefixes of labels, which requests with the same labels share.

    Prefixes are numbered, :data:`ROOT` being the empty one. Each knows the longest one that its own end is, so that
    a text is followed at constant cost per token (Aho and Corasick, 1975).

    Args:
        labels: tokens of every spelling of every label; of labels that begin alike, the first one is proposed.
    """

    def __init__(self, labels: Sequence[Tokens]) -> None:
        self._longer: dict[tuple[int, int], int] = {}  # by prefix and next token
        self._first: list[tuple[Tokens, int]] = [((), 0)]  # label and length
        for label in labels:
            prefix = ROOT
            for length, token in enumerate(label[:-1], start=1):
                prefix = self._longer.setdefault((prefix, token), len(self._first))
                if prefix == len(self._first):
                    self._first.append((label, length))
        self._fallbacks = [ROOT] * len(self._first)
        # The short ones first: those of the long ones are found through them.
        for (shorter, token), prefix in sorted(self._longer.items(), key=lambda item: self._first[item[1]][1]):
            if shorter != ROOT:
                self._fallbacks[prefix] = self.follow(self._fallbacks[shorter], token)

    def follow(self, prefix: int, token: int) -> int:
        """Return the longest prefix at the end of a text that ended with ``prefix`` before ``token``."""
        while (longer := self._longer.get((prefix, token))) is None:
            if prefix == ROOT:
                return ROOT
            prefix = self._fallbacks[prefix]
        return longer

    def rest(self, prefix: int) -> Tokens:
        """Return what is left of the first label with this prefix."""
        label, length = self._first[prefix]
        return label[length:]


class CandidateLabels:
    """Recognises the prefix of a label at the end of one request's output.

    Args:
        trie: of the labels.
    """

    def __init__(self, trie: LabelTrie) -> None:
        self._trie = trie
        self._prefix = ROOT

    def prepare(self, max_units: int) -> int:
        """Return 0: there is nothing to prepare."""
        return 0

    def extend(self, tokens: Sequence[int]) -> None:
        """Append committed tokens of the output; those of the prompt begin no label."""
        for token in tokens:
            self._prefix = self._trie.follow(self._prefix, token)

    def propose(self, max_tokens: int) -> list[int]:
        """Return up to ``max_tokens`` tokens of the rest of the label whose longest prefix the output ends with."""
        return list(self._trie.rest(self._prefix)[:max_tokens])


def spellings(label: str) -> list[str]:
    """Return a label as it stands, and after a space, as it is tokenised behind other text."""
    return [label] if label[0].isspace() else [label, f" {label}"]
