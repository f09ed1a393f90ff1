"""Promises of a time per token: what a request counts beside others, by how it has kept to its own so far."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

# Tokens on time that every answer begins with, so that the luck of its first steps does not decide.
HEAD_TOKENS = 8
# By the time taken in promised times: what a request counts. One that is ahead lends rows, and one that is late, or
# nearly, gets them. Simulated, drafts move from the others to promised users for the least tokens if all of these count
# 2 to 3: weights from 0.25 to 4 kept fewer promises, because rows moved among promised users, too. A promise that is
# too far gone is given up, because rows bring least on hard text; where that was at 1.1, luck decided. With the budget
# of the most weighted tokens, in place of that of the most tokens, nothing differed.
CURVE = ((0.8, 0.7), (0.95, 3.0), (1.5, 3.0), (1.8, 1.0))


@dataclass
class Pace:
    """The answer of one request beside its promise. Times are milliseconds of any monotonic clock.

    Attributes:
        tpot_ms: promised time per token behind the first; None for no promise.
        weight: what a draft of the request counts apart from that.
        began_ms: when its first tokens were known; None before.
        first_tokens: how many these were.
    """

    tpot_ms: float | None = None
    weight: float = 1.0
    began_ms: float | None = None
    first_tokens: int = 0

    @property
    def asks(self) -> bool:
        """Return whether the request asks for anything."""
        return self.tpot_ms is not None or self.weight != 1

    def begin(self, now_ms: float, tokens: int) -> None:
        """Begin the answer with its first tokens, if so many are known and it has not begun."""
        if self.began_ms is None and tokens:
            self.began_ms, self.first_tokens = now_ms, tokens

    def counts(self, now_ms: float, tokens: int) -> float:
        """Return what a draft of the request counts now, with so many tokens known."""
        self.begin(now_ms, tokens)
        if self.tpot_ms is None or self.began_ms is None:
            return self.weight
        head_ms = HEAD_TOKENS * self.tpot_ms
        promised_ms = (tokens - self.first_tokens) * self.tpot_ms
        return self.weight * _urgency((now_ms - self.began_ms + head_ms) / (promised_ms + head_ms))

    def late_ms(self, now_ms: float, tokens: int) -> float:
        """Return by how much so many tokens are later than promised; negative if they are early, 0 of no promise."""
        if self.tpot_ms is None or self.began_ms is None:
            return 0.0
        return now_ms - self.began_ms - (tokens - self.first_tokens) * self.tpot_ms


def _urgency(taken: float) -> float:
    if taken <= CURVE[0][0]:
        return CURVE[0][1]
    for (left, before), (right, after) in pairwise(CURVE):
        if taken < right:
            return before + (after - before) * (taken - left) / (right - left)
    return CURVE[-1][1]
