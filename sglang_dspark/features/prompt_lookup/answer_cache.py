"""Finished answers, kept on the host under the keys of their requests: others may go on as these did."""

from __future__ import annotations

import sys
from collections import OrderedDict
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

MOST_TOKENS = 8192
"""Of the answers under one key; the newest are kept."""
_ENTRY_BYTES = 200  # of the dictionary, for each key
_BREAK = np.array([-1], dtype=np.int32)
_NOTHING = _BREAK[:0]

Key = str | bytes
"""What a client has chosen, or what :func:`~.options.answer_key` has made of a prompt; nothing where empty."""


class AnswerCache:
    """Keep answers by key, those that were used last.

    It depends on nothing but the requests and their order, so all ranks of a server keep the same.

    Args:
        most_bytes: of all keys and answers; 0 keeps nothing.
        by_prompt: whether requests without a key have one made of their prompt.
    """

    def __init__(self, most_bytes: int, *, by_prompt: bool = False) -> None:
        self._texts: OrderedDict[Key, NDArray[np.int32]] = OrderedDict()
        self._most_bytes, self.num_bytes = most_bytes, 0
        self.by_prompt = by_prompt

    def keep(self, key: Key, tokens: Sequence[int]) -> None:
        """Put an answer before those of its key, and drop what there is no room for."""
        answer, before = np.array(tokens[: MOST_TOKENS - 1], dtype=np.int32), self._drop(key)
        text = np.concatenate([_BREAK, answer, before[: MOST_TOKENS - 1 - len(answer)]])
        self._texts[key] = text
        self.num_bytes += _bytes(key, text)
        while self.num_bytes > self._most_bytes:
            self._drop(next(iter(self._texts)))

    def read(self, key: Key) -> NDArray[np.int32]:
        """Return [n] tokens of the answers of a key, the newest first, -1 before each; it does not change any more."""
        if key not in self._texts:
            return _NOTHING
        self._texts.move_to_end(key)
        return self._texts[key]

    def clear(self) -> None:
        """Drop everything."""
        self._texts.clear()
        self.num_bytes = 0

    def _drop(self, key: Key) -> NDArray[np.int32]:
        """Forget a key, and return its answers."""
        text = self._texts.pop(key, None)
        if text is None:
            return _NOTHING
        self.num_bytes -= _bytes(key, text)
        return text


def _bytes(key: Key, text: NDArray[np.int32]) -> int:
    return sys.getsizeof(key) + sys.getsizeof(text) + _ENTRY_BYTES
