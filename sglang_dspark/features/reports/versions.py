"""Accept length by version of the weights."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Sequence

from sglang_dspark.features.reports.counters import Counters

MOST = 8
"""Versions that are kept, those that were in force last."""
Key = tuple[str, str]
"""Version of the target's weights, and the drafter's folder."""


class Versions:
    """Keeps rounds and tokens of each version.

    Args:
        counters: of all of them together.
        key: of the version in force.
    """

    def __init__(self, counters: Counters, key: Key) -> None:
        self._counters = counters
        self._counts: OrderedDict[Key, tuple[int, int]] = OrderedDict({key: (0, 0)})
        self._begun = self._until_now()

    def change(self, key: Key) -> None:
        """Count for another version from now on."""
        self._count()
        self._counts[key] = self._counts.pop(key, (0, 0))
        while len(self._counts) > MOST:
            self._counts.popitem(last=False)

    def counts(self) -> list[tuple[Key, tuple[int, int]]]:
        """Return rounds and committed tokens of each version, the one in force last."""
        self._count()
        return list(self._counts.items())

    def _until_now(self) -> tuple[int, int]:
        total = self._counters.sums().total()
        return total.rounds, total.committed

    def _count(self) -> None:
        before, self._begun = self._begun, self._until_now()
        key = next(reversed(self._counts))
        rounds, committed = self._counts[key]
        self._counts[key] = rounds + self._begun[0] - before[0], committed + self._begun[1] - before[1]


def report(counted: Iterable[Sequence[tuple[Key, tuple[int, int]]]]) -> list[dict[str, object]]:
    """Return JSON of the counts of several schedulers, which have had the same versions."""
    added: dict[Key, tuple[int, int]] = {}
    for counts in counted:
        for (version, drafter), (rounds, committed) in counts:
            so_far = added.get((version, drafter), (0, 0))
            added[version, drafter] = so_far[0] + rounds, so_far[1] + committed
    return [
        {
            "weight_version": version,
            "drafter": drafter,
            "rounds": rounds,
            "accept_length": committed / rounds if rounds else None,
        }
        for (version, drafter), (rounds, committed) in added.items()
    ]
