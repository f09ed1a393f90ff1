"""Values made from a batch's requests, kept while these stay the same: as they do from most steps to the next."""

from collections.abc import Callable, Sequence
from operator import is_
from typing import Generic, TypeVar

from sglang_dspark.engine.sglang_types import Req

T = TypeVar("T")


class CachedByBatch(Generic[T]):
    """A value made from a batch's requests, and made again only when these change.

    Args:
        make: from the requests, in order.
    """

    def __init__(self, make: Callable[[Sequence[Req]], T]) -> None:
        self._make = make
        # The objects, not their ids: a client may use a request id again with other parameters.
        self._last: tuple[list[Req], T] | None = None

    def read(self, reqs: Sequence[Req]) -> T:
        """Return the value of ``reqs``."""
        if self._last is not None:
            last, value = self._last
            if len(reqs) == len(last) and all(map(is_, reqs, last)):
                return value
        value = self._make(reqs)
        self._last = list(reqs), value
        return value

    def forget(self) -> None:
        """Make the value again: something that it is made of, other than the requests, has changed."""
        self._last = None
