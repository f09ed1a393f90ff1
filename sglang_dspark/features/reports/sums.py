"""Sums over decode steps, and the figures that follow from them.

Everything reported is a function of sums, so that any span of time is a difference of two.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Self, TypedDict

import numpy as np
from numpy.typing import NDArray

STEPS, PLAIN_STEPS, PARKED_STEPS, DRAFTED, TIMED_STEPS, MEASURED_MS, PREDICTED_MS = range(7)
COPIED, COPIED_ACCEPTED, COPYING_ROUNDS, COPYING_VERIFIED, COPYING_ACCEPTED = range(7, 12)
TEXT, CACHE = (12, 13, 14), (15, 16, 17)  # proposed, verified, accepted
THINKING_ROUNDS, THINKING_ACCEPTED, UNPROPOSED, NUM_SCALARS = range(18, 22)
"""Columns of :attr:`Sums.loads` before those that count rounds by outcome."""
NUM_LOADS = 16


def load_of(requests: int) -> int:
    """Row of :attr:`Sums.loads` for a step of so many requests: 1, 2, 3-4, 5-8, 9-16 and so on."""
    return min((requests - 1).bit_length(), NUM_LOADS - 1)


def requests_of(load: int) -> tuple[int, int]:
    """Return the fewest and the most requests of a row of :attr:`Sums.loads`."""
    return (1 << load - 1) + 1 if load else 1, 1 << load


class SumsLists(TypedDict):
    """:class:`Sums` as JSON."""

    loads: list[list[float]]
    predicted: list[list[float]]


@dataclass(frozen=True)
class Sums:
    """Sums over decode steps; a round is one request in one step.

    Attributes:
        loads: [NUM_LOADS, NUM_SCALARS + 3 * (gamma + 1)], by the number of requests in the step. After the scalars,
            the number of rounds by drafts verified, by drafts accepted, and once more by drafts accepted, of the rounds
            that rejected one; without the rounds in which a preset copied, which say nothing about the drafter.
        predicted: [3, n], by position in the block, over the verified drafts whose survival was predicted: their
            number, the sum of the predictions, and how many survived. n is at most gamma.
    """

    loads: NDArray[np.float64]
    predicted: NDArray[np.float64]

    @classmethod
    def of(cls, listed: Iterable[SumsLists]) -> Self:
        """Return the sum of what :meth:`lists` has returned, of one scheduler or several."""
        loads, predicted = zip(*((one["loads"], one["predicted"]) for one in listed), strict=True)
        return cls(np.sum(loads, 0), np.sum(predicted, 0))

    def lists(self) -> SumsLists:
        """Return both arrays as JSON."""
        return {"loads": self.loads.tolist(), "predicted": self.predicted.tolist()}

    def __sub__(self, earlier: Sums) -> Sums:
        return Sums(self.loads - earlier.loads, self.predicted - earlier.predicted)

    def total(self) -> Figures:
        """Over all loads."""
        return Figures(self.loads.sum(0), self.predicted)

    def by_load(self) -> list[dict[str, object]]:
        """JSON: the figures that depend on the load, by number of requests; loads that never occurred are left out."""
        report: list[dict[str, object]] = []
        for load, row in enumerate(self.loads):
            if row[STEPS]:
                figures = Figures(row)
                report.append({"requests": list(requests_of(load)), **figures.counts(), **figures.means()})
        return report

    def report(self) -> dict[str, object]:
        """JSON: counts, means, figures by position and by load."""
        total = self.total()
        return {**total.counts(), **total.means(), **total.by_position(), "by_load": self.by_load()}


class Figures:
    """The figures that follow from one row of sums.

    Args:
        row: [NUM_SCALARS + 3 * (gamma + 1)] of :attr:`Sums.loads`.
        predicted: as in :class:`Sums`; needed by :meth:`by_position` alone.
    """

    def __init__(self, row: NDArray[np.float64], predicted: NDArray[np.float64] | None = None) -> None:
        self._row, self._predicted = row, predicted
        self._verified, self._accepted, self._rejected = row[NUM_SCALARS:].reshape(3, -1)
        self.gamma = len(self._verified) - 1
        lengths = np.arange(self.gamma + 1)
        self.rounds = int(self._verified.sum() + row[COPYING_ROUNDS])
        self.verified = int(self._verified @ lengths + row[COPYING_VERIFIED])
        self.accepted = int(self._accepted @ lengths + row[COPYING_ACCEPTED])

    @property
    def steps(self) -> int:
        return int(self._row[STEPS])

    @property
    def committed(self) -> int:
        """Return the tokens gained: accepted drafts, and one correction or bonus token per round."""
        return self.accepted + self.rounds

    @property
    def accept_length(self) -> float | None:
        """Return the mean tokens per round, bonus included; None before the first round."""
        return _ratio(self.committed, self.rounds)

    def counts(self) -> dict[str, int]:
        """JSON: numbers of steps, rounds and tokens."""
        return {
            "steps": self.steps,
            "plain_steps": int(self._row[PLAIN_STEPS]),
            "parked_steps": int(self._row[PARKED_STEPS]),
            "rounds": self.rounds,
            "drafted_tokens": int(self._row[DRAFTED]),
            "copied_tokens": int(self._row[COPIED]),
            "copied_accepted_tokens": int(self._row[COPIED_ACCEPTED]),
            **{
                f"{source}_{what}_tokens": int(self._row[column])
                for source, columns in (("text", TEXT), ("cache", CACHE))
                for what, column in zip(("proposed", "verified", "accepted"), columns, strict=True)
            },
            "thinking_rounds": int(self._row[THINKING_ROUNDS]),
            "verified_tokens": self.verified,
            "accepted_tokens": self.accepted,
            "committed_tokens": self.committed,
            "unproposed_tokens": int(self._row[UNPROPOSED]),
            "timed_steps": int(self._row[TIMED_STEPS]),
        }

    def means(self) -> dict[str, float | None]:
        """JSON: ratios of the counts, and mean step times; None if nothing was counted.

        ``wasted_verify_fraction`` is (k - (tau - 1)) / k with k drafts verified per round and accept length tau.
        """
        row, timed = self._row, self._row[TIMED_STEPS]
        thinking, kept = row[THINKING_ROUNDS], row[THINKING_ACCEPTED]
        answering = self.rounds - thinking
        return {
            "accept_length": self.accept_length,
            "thinking_accept_length": _ratio(thinking + kept, thinking),
            "answer_accept_length": _ratio(answering + self.accepted - kept, answering),
            "coverage": _ratio(self.committed - row[UNPROPOSED], self.committed),
            "verify_length": _ratio(self.verified, self.rounds),
            "wasted_verify_fraction": _ratio(self.verified - self.accepted, self.verified),
            "running_requests": _ratio(self.rounds, self.steps),
            "measured_step_ms": _ratio(row[MEASURED_MS], timed),
            # A server without a table of step times predicts none.
            "predicted_step_ms": _ratio(row[PREDICTED_MS], timed) if row[PREDICTED_MS] else None,
        }

    def positions(self) -> NDArray[np.float64]:
        """[3, gamma] the drafter's drafts by position: verified, with all before them accepted, accepted."""
        verified = self._verified[:0:-1].cumsum()[::-1]
        accepted = self._accepted[:0:-1].cumsum()[::-1]
        # A draft was put to the test if those before it were accepted: at the first rejected one, the test was lost.
        return np.stack([verified, accepted + self._rejected[:-1], accepted])

    def by_position(self) -> dict[str, list[float | None]]:
        """JSON, position 0 first.

        ``survival``: share of the verified drafts that were accepted, and with them all before.
        ``conditional_acceptance``: the same, of those whose predecessors were accepted. ``predicted_survival``: mean
        prediction for verified drafts, made before the outcome. ``calibration_error``: by how much it was above what
        came of the same drafts.
        """
        assert self._predicted is not None
        verified, tested, accepted = self.positions().tolist()
        drafts, predicted, survived = self._predicted.tolist()
        unknown = [None] * (self.gamma - len(drafts))
        errors = [_ratio(p - s, n) for p, s, n in zip(predicted, survived, drafts, strict=True)]
        return {
            "survival": [_ratio(a, v) for a, v in zip(accepted, verified, strict=True)],
            "conditional_acceptance": [_ratio(a, t) for a, t in zip(accepted, tested, strict=True)],
            "predicted_survival": [_ratio(p, n) for p, n in zip(predicted, drafts, strict=True)] + unknown,
            "calibration_error": errors + unknown,
        }


def _ratio(part: float, whole: float) -> float | None:
    return float(part / whole) if whole else None
