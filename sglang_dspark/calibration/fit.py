"""Judges whether a drafter fits its target by its first drafts, beside what its own confidence promises, and chance."""

from dataclasses import dataclass
from enum import StrEnum
from math import sqrt
from typing import Any

FEWEST = 64
"""First drafts before anything is said."""
MOST = 4096
"""First drafts after which the verdict stays."""
CHANCE = 0.05
"""Acceptance of first drafts that a guess without a look at the text comes near: the target's commonest token."""
NO_HEAD = 0.12
"""The same below which a drafter that promises nothing is named: 0.1 is what wrong taps reach."""
PROMISE = 1 / 3
"""Share of what a drafter's confidence promises below which it is named."""
_Z = 3.0
"""Standard deviations of the interval, which is looked at often."""


class Verdict(StrEnum):
    """Name what is known of the fit of a drafter."""

    UNKNOWN = "unknown"
    FITS = "fits"
    MISFIT = "misfit"


@dataclass(frozen=True)
class Fit:
    """Hold what is known of a drafter's first drafts, those at position 0 of a block.

    Attributes:
        first_drafts: verified.
        accepted: of them.
        promised: mean probability that the drafter's raw confidence, of its head or its selector, gave to first drafts;
            None without one.
    """

    first_drafts: int = 0
    accepted: int = 0
    promised: float | None = None

    @property
    def share(self) -> float | None:
        """Return the accepted share; None before the first draft."""
        return self.accepted / self.first_drafts if self.first_drafts else None

    @property
    def most(self) -> float:
        """Return the upper end of the acceptance's interval (Wilson, 1927), 1 before the first draft."""
        n, z2 = self.first_drafts, _Z * _Z
        if n == 0:
            return 1.0
        share = self.accepted / n
        return (share + z2 / (2 * n) + _Z * sqrt(share * (1 - share) / n + z2 / (4 * n * n))) / (1 + z2 / n)

    @property
    def verdict(self) -> Verdict:
        """Return whether the drafter fits.

        A head that promises little on hard texts is believed, unless chance would do as well.
        """
        if self.first_drafts < FEWEST:
            return Verdict.UNKNOWN
        least = NO_HEAD if self.promised is None else max(CHANCE, PROMISE * self.promised)
        return Verdict.MISFIT if self.most < least else Verdict.FITS

    @property
    def sentence(self) -> str:
        """Return the finding in words."""
        if self.share is None:
            return "no first draft has been verified yet"
        promise = "" if self.promised is None else f"; its own confidence promised {self.promised:.0%}"
        return f"{self.share:.1%} of {self.first_drafts} first drafts were accepted{promise}"

    @property
    def warning(self) -> str | None:
        """Return the warning about a drafter that does not fit; None if it fits."""
        if self.verdict is not Verdict.MISFIT:
            return None
        return (
            f"the drafter hardly predicts this target: {self.sentence}. Usual causes: it was made for another target "
            "or chat template, its taps are wrong, or its weights are misread (docs/operating.md, section A drafter "
            "that does not fit, says how each looks). Texts stay exact, but decoding is slower than without speculation"
        )

    def report(self) -> dict[str, Any]:
        """Return it as JSON."""
        return {
            "verdict": str(self.verdict),
            "first_drafts": self.first_drafts,
            "accepted": self.share,
            "promised": self.promised,
            "warning": self.warning,
        }
