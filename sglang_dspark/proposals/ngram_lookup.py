"""Prompt lookup: drafts copied from behind the last place where the text ended alike (preset ``summarization``)."""

from __future__ import annotations

from array import array
from collections.abc import Sequence

import numpy as np

PICTURE = -1
"""Stands in a text for each token of a picture, whose ids no vocabulary has."""

_SEGMENT = 1 << 14  # n-grams: a dictionary of about this size is enlarged in well under a millisecond


class NgramIndex:
    """An index of the n-grams of a growing text, built in bounded steps.

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

    def advance(self, max_positions: int) -> int:
        """Index up to ``max_positions`` more positions of the text; return how many there were."""
        start, stop = self._next, min(self._next + max_positions, len(self._text))
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
        """Return the position after the last occurrence."""
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
    """Look one request's text up in itself, the longest suffix first.

    A step costs a few dictionary entries per committed token and as many look-ups, whatever the length of the text;
    what a prompt costs is spread over steps by :meth:`prepare`.

    Args:
        prompt: the beginning of the text.
    """

    def __init__(self, prompt: Prompt) -> None:
        self._prompt = prompt
        self._text = prompt.tokens[:]
        # The n-gram at the end of the prompt is followed by the output, as all later ones are.
        self._output = NgramIndex(self._text, max(1, len(self._text)), prompt.lengths)

    def prepare(self, max_units: int) -> int:
        """Index up to ``max_units`` more n-grams, those of the output first; return how many there were."""
        positions = max_units // len(self._prompt.lengths)
        done = self._output.advance(positions)
        return len(self._prompt.lengths) * (done + self._prompt.index.advance(positions - done))

    def extend(self, tokens: Sequence[int]) -> None:
        """Append committed tokens."""
        self._text.extend(tokens)

    def propose(self, max_tokens: int) -> list[int]:
        """Return up to ``max_tokens`` tokens that followed the latest match of the text's longest matching suffix.

        If the match runs into the end of the text, copying restarts at its beginning: a text that repeats a period is
        expected to keep repeating it. It ends before a picture. Only indexed n-grams are found.
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
                    copied = [text[start + position % period] for position in range(max_tokens)]
                    return copied[: copied.index(PICTURE)] if PICTURE in copied else copied
        return []


def as_bytes(tokens: Sequence[int], vocab_size: int) -> bytes:
    """Return the tokens in the form that :class:`Prompt` takes; those behind the vocabulary are of pictures."""
    ids = np.asarray(tokens, dtype=np.int64)
    return np.where(ids < vocab_size, ids, PICTURE).astype(np.int32).tobytes()
