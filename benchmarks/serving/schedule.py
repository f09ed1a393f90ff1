"""Order of the measurements of a sweep."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from serving.configurations import Configuration

WARM_UP_ROUND = -1


@dataclass(frozen=True)
class Cell:
    """One measurement: a configuration at a concurrency in a round.

    Attributes:
        position: when it runs among the configurations of its round and concurrency, from 0.
    """

    configuration: Configuration
    concurrency: int
    round: int
    position: int

    @property
    def is_warm_up(self) -> bool:
        """Whether the result is thrown away."""
        return self.round == WARM_UP_ROUND


def interleave(configurations: Sequence[Configuration], concurrencies: Sequence[int], num_rounds: int) -> list[Cell]:
    """All cells in the order in which they run, the warm-up round first.

    A shared machine drifts within minutes, so configurations that are compared run right after one another, and the
    starting one moves on from round to round and from concurrency to concurrency: over as many rounds as there are
    configurations each one has been at every position.
    """
    cells = []
    for round_index in range(WARM_UP_ROUND, num_rounds):
        for offset, concurrency in enumerate(concurrencies):
            order = rotate(configurations, round_index + offset)
            cells += [Cell(c, concurrency, round_index, position) for position, c in enumerate(order)]
    return cells


def rotate(items: Sequence[Configuration], by: int) -> list[Configuration]:
    """``items`` from position ``by`` (modulo their number) on, then those before it."""
    start = by % len(items)
    return [*items[start:], *items[:start]]
