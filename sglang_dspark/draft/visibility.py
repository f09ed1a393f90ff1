"""Rows that the attention of a draft layer sees: full or sliding context, and a block that is causal or not.

Slot k of a block stands at position p + k, p being the anchor's. ``age`` of a context row is its distance before the
anchor, p - j >= 1 for the row at position j.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class Visibility:
    """The rows that one layer sees.

    Attributes:
        window: width of a sliding window; None sees the whole context.
        from_anchor: the window holds the ``window`` rows before the anchor, for all slots alike. Otherwise it slides
            with the slot, which counts as one of its rows: slot k sees ``age <= window - 1 - k``, and of the block the
            slots above k - window.
        causal: a slot sees the block up to itself, not all of it.
    """

    window: int | None = None
    from_anchor: bool = False
    causal: bool = False

    @property
    def is_full(self) -> bool:
        """Return whether everything is seen."""
        return self.window is None and not self.causal

    @property
    def slides(self) -> bool:
        """Return whether the slots of a block see different parts of the context."""
        return self.window is not None and not self.from_anchor

    @property
    def reach(self) -> int | None:
        """Return the age of the oldest context row that any slot sees; None without a limit."""
        return self.window if self.window is None or self.from_anchor else self.window - 1

    def sees_context(self, ages: Tensor, slots: Tensor) -> Tensor:
        """Bool of the shape that ``ages`` (at least 1) and ``slots`` broadcast to."""
        if self.window is None:
            return ages + slots > 0
        return (ages <= self.window) & (slots >= 0) if self.from_anchor else ages + slots < self.window

    def sees_block(self, slots: Tensor) -> Tensor:
        """``slots`` 0..n-1 of a block -> ``[n, n]`` bool, a row per query slot."""
        ahead = slots - slots[:, None]
        seen = ahead <= (0 if self.causal else len(slots))
        return seen & (-ahead < (self.window or 0)) if self.slides else seen
