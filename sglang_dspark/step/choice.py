"""What a policy decides about a step, before anything is drafted."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from enum import Enum

from sglang_dspark.step.limits import Limits


class Rule(Enum):
    """How verify lengths follow from a choice and the live confidences."""

    UNIFORM = "uniform"
    TOP = "top"
    EARLY_STOP = "early-stop"
    THRESHOLD = "threshold"


@dataclass(frozen=True)
class Choice:
    """What a policy decided before the step's noise is drawn.

    Attributes:
        rule: how lengths are found.
        depth: drafts proposed per request, 0 for a plain step.
        budget: drafts verified in all, under the rule TOP.
        forced: request that is verified to the full depth whatever its survivals.
        drafted: requests that are drafted, ascending; None drafts all.
        weight: rounds that what this step verifies stands for in what is learned.
        limits: what requests ask for themselves, see :meth:`within`; None when nobody asks for anything.
        with_confidence: whether the drafter's confidences are computed.
        context: mean context tokens per request, which the choice was made for. It travels here, so that all ranks of
            a server take rank 0's.
    """

    rule: Rule
    depth: int
    budget: int = 0
    forced: int | None = None
    drafted: tuple[int, ...] | None = None
    weight: int = 1
    limits: Limits | None = None
    with_confidence: bool = field(default=True, compare=False)
    context: float = field(default=0.0, compare=False)

    def depths(self, requests: int) -> list[int]:
        """Drafts that the drafter proposes for each of the step's requests."""
        if self.drafted is None:
            return [self.depth] * requests
        drafted = set(self.drafted)
        return [self.depth if request in drafted else 0 for request in range(requests)]

    def is_uniform(self, requests: int) -> bool:
        """Whether every request verifies its whole block, whatever the confidences."""
        if self.limits is not None or self.drafted is not None:
            return False
        return self.rule is Rule.UNIFORM or (self.rule is Rule.TOP and self.budget == requests * self.depth)

    @property
    def needs_confidence(self) -> bool:
        """Whether a request asks for a bound by confidence."""
        return self.limits is not None and self.limits.thresholds is not None

    @property
    def has_copies(self) -> bool:
        """Whether presets propose drafts of this step."""
        return self.limits is not None and any(self.limits.copied)

    def most_drafts(self, requests: int) -> int | None:
        """Drafts that are verified in all, or fewer where a request has a bound; None where live values decide."""
        if self.rule is Rule.UNIFORM:
            return requests * self.depth
        return self.budget if self.rule is Rule.TOP else None

    def within(self, limits: Limits) -> Choice:
        """The same step with what single requests ask for.

        Requests that may not verify anything, and those with copied drafts, are not drafted. What a request may not
        verify is left to others as far as the budget goes; copied drafts come on top of the budget.
        """
        requests, copied = len(limits.most), sum(limits.copied)
        candidates = range(requests if self.depth else 0) if self.drafted is None else self.drafted
        drafted = tuple(r for r in candidates if limits.most[r] and not limits.copied[r])
        if not drafted and not copied:
            return PLAIN
        depth = self.depth if drafted else 0
        most = tuple(limits.copied[r] or (min(limits.most[r], depth) if r in drafted else 0) for r in range(requests))
        left = sum(most) - copied
        bounds = limits.thresholds
        thresholds = bounds if bounds is not None and any(bounds[r] for r in drafted) else None
        if not copied and left == len(candidates) * depth and thresholds is None:
            return self
        live = drafted and self.rule not in (Rule.UNIFORM, Rule.TOP)
        return replace(
            self,
            rule=self.rule if live else Rule.TOP,
            depth=depth,
            budget=(min(self.budget, left) if self.rule is Rule.TOP else left) + copied,
            forced=self.forced if self.forced in drafted else None,
            drafted=None if len(drafted) == requests else drafted,
            limits=Limits(most, limits.copied, thresholds),
        )

    def for_some(self, drafted: Sequence[int], requests: int) -> Choice:
        """The same step with only ``drafted`` of the ``requests`` requests drafted."""
        if len(drafted) == requests:
            return self
        if not drafted:
            return PLAIN
        most = len(drafted) * self.depth
        if self.rule is Rule.UNIFORM:
            return replace(self, rule=Rule.TOP, drafted=tuple(drafted), budget=most)
        return replace(self, drafted=tuple(drafted), budget=min(self.budget, most))


PLAIN = Choice(Rule.UNIFORM, depth=0)
