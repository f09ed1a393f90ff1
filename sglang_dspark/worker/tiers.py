"""The shapes that decode steps are captured in as CUDA graphs. Pure arithmetic."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass

# A verification of more tokens keeps a GPU busy for so long that launching it kernel by kernel costs nothing.
MAX_TOKENS = 1024
# Every captured draft of sampled requests keeps its scores, [slots, gamma, V] float32: 270 MB for the tiers up to here
# with 152k tokens and gamma 7.
MAX_SAMPLED = 32


@dataclass(frozen=True)
class Tiers:
    """Captured sizes, ascending; a step runs in the smallest that has room for it.

    Attributes:
        requests: request slots of a draft of greedy requests, and of a plain step.
        sampled: request slots of a draft with sampled requests: powers of two.
        tokens: rows of a verification forward.
    """

    requests: tuple[int, ...]
    sampled: tuple[int, ...]
    tokens: tuple[int, ...]

    @classmethod
    def of(cls, requests: Sequence[int], max_verify: int) -> Tiers:
        """Return tiers for up to ``max(requests)`` requests that verify up to ``max_verify`` drafts each.

        Args:
            requests: sizes that SGLang would capture.
        """
        most = min(max(requests) * (max_verify + 1), MAX_TOKENS)
        tokens, size = [], 2
        while size < most:
            tokens.append(size)
            # Every size up to 16, then eight to a power of two: at most an eighth of a tier is padding.
            size += 1 << max(0, size.bit_length() - 4)
        slots = tuple(sorted(requests))
        sampled = tuple(size for size in slots if size <= MAX_SAMPLED and size & (size - 1) == 0)
        return cls(slots, sampled, (*tokens, most) if max_verify else ())

    @property
    def timed(self) -> tuple[int, ...]:
        """Return rows whose time is known. The plain step of one request has a row fewer than any with drafts."""
        return (1, *self.tokens) if self.tokens else ()

    @property
    def digest(self) -> str:
        """Return a short name: tables that were measured with other tiers do not fit."""
        rows = max(self.tokens, default=0)
        return f"{len(self.requests)} sizes to {self.requests[-1]} requests, {len(self.tokens)} to {rows} rows"


def at_least(sizes: Sequence[int], wanted: int) -> int | None:
    """Return the smallest of ``sizes``, which ascend, that has room for ``wanted``; None if there is none."""
    index = bisect_left(sizes, wanted)
    return sizes[index] if index < len(sizes) else None
