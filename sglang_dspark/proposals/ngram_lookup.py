"""Prompt lookup: what followed the last time that the text ended like this (preset ``summarization``)."""

from __future__ import annotations

from array import array
from collections.abc import Sequence

import numpy as np

_SEGMENT = 1 << 14  # n-grams: a dictionary of about this size is enlarged in well under a millisecond


class NgramIndex:
    """The n-grams of a growing text by what follows them, indexed in bounded steps.

    Args:
        text: int32 tokens; may grow while they are indexed.
        first: position before which n-grams do not end.
        lengths: of the n-grams.
    """

    def __init__(self, text: array[int], first: int, lengths: range) -> None:
        self._text, self._lengths = text, lengths
        self._next = first
        # Position after the last occurrence of every n-gram that something follows, the latest occurrences last.
        self._segments: list[dict[bytes, int]] = [{}]

    def advance(self, most: int) -> int:
        """Index up to ``most`` more positions of the text; return how many there were."""
        start, stop = self._next, min(self._next + most, len(self._text))
        if stop <= start:
            return 0
        if len(self._segments[-1]) >= _SEGMENT:
            self._segments.append({})
        before = max(0, start - self._lengths[0])
        tokens, size = self._text[before:stop].tobytes(), self._text.itemsize
        for length in self._lengths:
            positions = range(max(start, length), stop)
            ends = range((positions.start - before) * size, (stop - before) * size, size)
            ngrams = [tokens[end - length * size : end] for end in ends]
            self._segments[-1].update(zip(ngrams, positions, strict=True))
        self._next = stop
        return stop - start

    def find(self, ngram: bytes) -> int | None:
        """The place after the last occurrence."""
        for segment in reversed(self._segments):
            position = segment.get(ngram)
            if position is not None:
                return position
        return None


class Prompt:
    """A prompt and its n-grams, which several samples of it may share.

    Args:
        tokens: int32 as bytes, see :func:`as_bytes`.
        min_ngram, max_ngram: lengths of the suffix that is looked up.
    """

    def __init__(self, tokens: bytes, min_ngram: int, max_ngram: int) -> None:
        self.tokens = array("i")
        self.tokens.frombytes(tokens)
        self.lengths = range(max_ngram, min_ngram - 1, -1)
        self.index = NgramIndex(self.tokens, 1, self.lengths)


class NgramLookup:
    """Looks one request's text up in itself, the longest suffix first.

    A step costs a few dictionary entries per committed token and as many look-ups, whatever the length of the text;
    what a prompt costs is spread over steps by :meth:`prepare`.

    Args:
        prompt: what the text begins with.
    """

    def __init__(self, prompt: Prompt) -> None:
        self._prompt = prompt
        self._text = prompt.tokens[:]
        # The n-gram at the end of the prompt is followed by the output, as all later ones are.
        self._output = NgramIndex(self._text, max(1, len(self._text)), prompt.lengths)

    def prepare(self, most: int) -> int:
        """Index up to ``most`` more n-grams, those of the output first; how many it were."""
        positions = most // len(self._prompt.lengths)
        done = self._output.advance(positions)
        return len(self._prompt.lengths) * (done + self._prompt.index.advance(positions - done))

    def extend(self, tokens: Sequence[int]) -> None:
        """Append committed tokens."""
        self._text.extend(tokens)

    def propose(self, most: int) -> list[int]:
        """Up to ``most`` tokens that followed the most recent earlier match of the text's longest matching suffix.

        Where the match runs into the end of the text, the proposal goes on with itself: a text that repeats a period
        is expected to keep repeating it. Only what is indexed is found.
        """
        text = self._text
        for length in self._prompt.lengths:
            if length <= len(text):
                suffix = text[-length:].tobytes()
                start = self._output.find(suffix)
                if start is None:
                    start = self._prompt.index.find(suffix)
                if start is not None:
                    period = len(text) - start
                    return [text[start + position % period] for position in range(most)]
        return []


def as_bytes(tokens: Sequence[int]) -> bytes:
    """Tokens as :class:`Prompt` takes them."""
    return np.asarray(tokens, dtype=np.int32).tobytes()
