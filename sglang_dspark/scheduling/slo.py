"""SLOs of time per token: what a draft of a request counts, by how the request has kept to its SLO so far."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

# Tokens on time that every answer begins with, so that the luck of its first steps does not decide.
HEAD_TOKENS = 8
# By the time taken over the time that the SLO allows: what a request counts. One that is early lends rows, and one that
# is late, or nearly, gets them. Simulated, drafts move from the others to users with an SLO for the least tokens if all
# of these count 2 to 3: weights from 0.25 to 4 met fewer SLOs, because rows moved among these users, too. One that is
# too late is given up, because rows bring least on hard text; where that was at 1.1, luck decided. With the budget of
# the most weighted tokens, in place of that of the most tokens, nothing differed.
CURVE = ((0.8, 0.7), (0.95, 3.0), (1.5, 3.0), (1.8, 1.0))


@dataclass
class SloState:
    """The answer of one request against its SLO. Times are milliseconds of any monotonic clock.

    Attributes:
        tpot_ms: time per token after the first that the SLO allows; None for no SLO.
        base_weight: what a draft of the request counts apart from that.
        began_ms: when its first tokens were known; None before.
        first_tokens: how many these were.
    """

    tpot_ms: float | None = None
    base_weight: float = 1.0
    began_ms: float | None = None
    first_tokens: int = 0

    @property
    def asks(self) -> bool:
        """Return whether the request asks for anything."""
        return self.tpot_ms is not None or self.base_weight != 1

    def begin(self, now_ms: float, tokens: int) -> None:
        """Begin the answer with its first tokens, if so many are known and it has not begun."""
        if self.began_ms is None and tokens:
            self.began_ms, self.first_tokens = now_ms, tokens

    def weight(self, now_ms: float, tokens: int) -> float:
        """Return what a draft of the request counts now, with so many tokens known."""
        self.begin(now_ms, tokens)
        if self.tpot_ms is None or self.began_ms is None:
            return self.base_weight
        head_ms = HEAD_TOKENS * self.tpot_ms
        allowed_ms = (tokens - self.first_tokens) * self.tpot_ms
        return self.base_weight * _urgency((now_ms - self.began_ms + head_ms) / (allowed_ms + head_ms))

    def late_ms(self, now_ms: float, tokens: int) -> float:
        """Return by how much so many tokens are later than the SLO allows; negative if early, 0 without an SLO."""
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
