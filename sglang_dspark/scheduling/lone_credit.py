"""Bounds what speculation may lose on a request that runs alone, whatever the drafter is worth."""

from collections.abc import Hashable

# In plain steps: what a request may lose at once, and what every step adds. Of 200 tokens it is 3 %. With a stake of 3,
# a text that changes loses up to 4 % more in the ablation; with half the rate, drafts that pay by a fifth on a costly
# target lose some 4 % more of their first 200 tokens, because more plain steps follow bad luck.
STAKE, RATE = 2.0, 0.02
# What was gained is kept up to this: with no more than the stake, drafts that pay by a little are given up too often.
MOST = 6.0


class LoneCredit:
    """The plain steps that drafting for a request that runs alone may still lose.

    A step with drafts takes what it costs beyond a plain step before it runs, and each draft that is accepted gives one
    back when the outcome is known. Only if the credit is enough for the whole cost are drafts made.
    """

    def __init__(self) -> None:
        self._request: Hashable = None
        self._left = STAKE

    def affords(self, request: Hashable, cost: float, *, pays: bool) -> bool:
        """Return whether the credit is enough for the next step of ``request``, and take its cost if it is.

        Args:
            cost: time of the step beyond a plain one, in plain steps.
            pays: whether drafts are expected to pay: a new request gets a new stake then, and otherwise what the one
                before it has left of its own.
        """
        if request != self._request:
            self._request, self._left = request, STAKE if pays else min(STAKE, self._left)
        cost = min(cost, STAKE)
        affords = cost <= self._left
        self._add(RATE - cost if affords else RATE)
        return affords

    def earn(self, request: Hashable, accepted: int) -> None:
        """Add the accepted drafts of a step."""
        if request == self._request:
            self._add(accepted)

    def _add(self, steps: float) -> None:
        self._left = min(MOST, self._left + steps)
