"""Order of the measurements of a sweep."""

from __future__ import annotations

import random
from collections.abc import Container, Sequence
from dataclasses import dataclass

from serving.configurations import Configuration
from serving.load import Load

WARM_UP_ROUND = -1
SEED = 0

CellKey = tuple[str, Load, int]
"""Label of the configuration, load, round."""


@dataclass(frozen=True)
class Cell:
    """One measurement: a configuration at a load in a round.

    Attributes:
        position: when it runs among the configurations of its round and load, from 0.
    """

    configuration: Configuration
    load: Load
    round: int
    position: int

    @property
    def key(self) -> CellKey:
        """Return what tells the cell from every other of its sweep."""
        return self.configuration.label, self.load, self.round

    @property
    def is_warm_up(self) -> bool:
        """Return whether the result is thrown away."""
        return self.round == WARM_UP_ROUND


def interleave(configurations: Sequence[Configuration], loads: Sequence[Load], num_rounds: int) -> list[Cell]:
    """Return all cells in the order in which they run, the warm-up round first.

    A shared machine drifts within minutes, so configurations that are compared run right after one another. Their order
    is drawn again for every round and load: were it fixed or rotated, each would always follow the same other one, and
    what that leaves behind (a warm cache, a lowered clock) would count as a property of its successor. Equal arguments
    give equal orders.
    """
    cells = []
    for round_index in range(WARM_UP_ROUND, num_rounds):
        for load in loads:
            order = random.Random(f"{SEED}, round {round_index}, {load}").sample(configurations, len(configurations))
            cells += [Cell(c, load, round_index, position) for position, c in enumerate(order)]
    return cells


def still_to_measure(cells: Sequence[Cell], measured: Container[CellKey]) -> list[Cell]:
    """Return the cells that have no row yet, after the warm-up of every configuration and load among them."""
    open_cells = [cell for cell in cells if not cell.is_warm_up and cell.key not in measured]
    warmed = {(cell.configuration.label, cell.load) for cell in open_cells}
    warm_ups = [cell for cell in cells if cell.is_warm_up and (cell.configuration.label, cell.load) in warmed]
    return [*warm_ups, *open_cells]
