"""What follows from the requests of a batch, kept while these stay the same: the next batch is most often the last."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Generic, TypeVar

T = TypeVar("T")


class LastBatch(Generic[T]):
    """A value made from a batch's requests, and made again only when these change.

    Args:
        make: from the requests, in order.
    """

    def __init__(self, make: Callable[[Sequence[Any]], T]) -> None:
        self._make = make
        # The objects, not their ids: a client may use a request id again with other parameters.
        self._reqs: list[Any] = []
        self._value: T | None = None

    def read(self, reqs: Sequence[Any]) -> T:
        """The value of ``reqs``."""
        same = len(reqs) == len(self._reqs) and all(a is b for a, b in zip(reqs, self._reqs, strict=True))
        if self._value is None or not same:
            self._value = self._make(reqs)
            self._reqs = list(reqs)
        return self._value
