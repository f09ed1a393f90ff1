"""Prompt lookup: what followed the last time that the text ended like this (preset ``summarization``)."""

from __future__ import annotations

from collections.abc import Sequence


class NgramLookup:
    """An index of one request's text by its n-grams, kept up to date token by token.

    A step costs a few dictionary entries per committed token and as many look-ups, whatever the length of the text.

    Args:
        prompt: tokens of the prompt.
        min_ngram, max_ngram: lengths of the suffix that is looked up, the longest first.
    """

    def __init__(self, prompt: Sequence[int], min_ngram: int, max_ngram: int) -> None:
        self._lengths = range(max_ngram, min_ngram - 1, -1)
        self._tokens: list[int] = []
        # Place after the last occurrence of every n-gram that something follows.
        self._after: dict[tuple[int, ...], int] = {}
        self.extend(prompt)

    def extend(self, tokens: Sequence[int]) -> None:
        """Append committed tokens."""
        for token in tokens:
            # Only now does something follow the n-grams that the text ended with.
            end = len(self._tokens)
            for length in self._lengths:
                if length <= end:
                    self._after[tuple(self._tokens[end - length :])] = end
            self._tokens.append(token)

    def propose(self, most: int) -> list[int]:
        """Up to ``most`` tokens that followed the most recent earlier match of the text's longest matching suffix.

        Where the match runs into the end of the text, the proposal goes on with itself: a text that repeats a period
        is expected to keep repeating it.
        """
        text = self._tokens
        for length in self._lengths:
            if length <= len(text):
                start = self._after.get(tuple(text[-length:]))
                if start is not None:
                    period = len(text) - start
                    return [text[start + place % period] for place in range(most)]
        return []
