"""What speculation may lose on a request that runs alone: a bound that holds whatever the drafter is worth."""

from collections.abc import Hashable

# In plain steps: what a request may lose at once, and what every step adds to that. Of 200 tokens it is 3.5 %. With a
# stake of 2, drafts that bring 1.2 times as many tokens as their time costs lose another 3 % in the first 200; with 4,
# hard requests among easy ones lose another 2 % in the ablation.
STAKE, RATE = 3.0, 0.02


class LoneCredit:
    """The plain steps that a request running alone may still lose.

    A step with drafts takes what it costs beyond a plain step before it runs, and gives back a step for each draft that
    was accepted when its outcome is known. What is gained beyond :data:`STAKE` is not kept: a text that gets hard is
    found out as soon as one that begins hard.
    """

    def __init__(self) -> None:
        self._request: Hashable = None
        self._left = STAKE

    def affords(self, request: Hashable, cost: float, *, pays: bool) -> bool:
        """Return whether the credit is enough for the next step of ``request``, and take its cost if it is.

        Args:
            cost: time of the step beyond a plain one, in plain steps.
            pays: whether drafts are expected to pay: a new request has a new stake then, and otherwise what the one
                before it has left.
        """
        if request != self._request:
            self._request = request
            if pays:
                self._left = STAKE
        affords = cost <= self._left
        self._add(RATE - cost if affords else RATE)
        return affords

    def earn(self, request: Hashable, accepted: int) -> None:
        """Add what became of a step: its accepted drafts."""
        if request == self._request:
            self._add(accepted)

    def _add(self, steps: float) -> None:
        self._left = min(STAKE, self._left + steps)
