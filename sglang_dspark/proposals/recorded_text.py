"""Copies drafts from a text that the answer is expected to be (preset ``replay``)."""

from __future__ import annotations

from collections.abc import Sequence


class RecordedText:
    """Proposes what comes next in a recorded text, as long as one request's output follows it.

    A greedy answer of the target itself is a text that is always right: an oracle, which shows what an engine can do
    with a drafter that costs nothing.

    Args:
        recorded: token ids of the text.
    """

    def __init__(self, recorded: Sequence[int]) -> None:
        self._recorded = recorded
        self._length: int | None = 0  # of the output; None once it has left the text

    def prepare(self, max_units: int) -> int:
        """Return 0: there is nothing to prepare."""
        return 0

    def extend(self, tokens: Sequence[int]) -> None:
        """Append committed tokens of the output."""
        if self._length is None:
            return
        end = self._length + len(tokens)
        self._length = end if list(self._recorded[self._length : end]) == list(tokens) else None

    def propose(self, max_tokens: int) -> list[int]:
        """Return up to ``max_tokens`` tokens of the text behind the output."""
        if self._length is None:
            return []
        return list(self._recorded[self._length : self._length + max_tokens])
