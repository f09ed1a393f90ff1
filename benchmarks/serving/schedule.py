"""Set the order of a sweep's measurements."""

from __future__ import annotations

import random
from collections.abc import Container, Sequence
from dataclasses import dataclass
from typing import Annotated

from serving.configurations import Configuration
from sglang_dspark.declared import int_range
from sglang_dspark.tools.cli.options import Numbers

USERS = Numbers(Annotated[int, int_range(1)], distinct=True)
"""Kind of the option ``--concurrency``."""
WARM_UP_ROUND = -1
SEED = 0

CellKey = tuple[str, int, int]
"""Label of the configuration, users, round."""


@dataclass(frozen=True)
class Cell:
    """One measurement: a configuration in a round, with so many users.

    Attributes:
        users: each sends the next prompt when its last answer is complete.
        position: when it runs among the configurations of its round and users, from 0.
    """

    configuration: Configuration
    users: int
    round: int
    position: int

    @property
    def key(self) -> CellKey:
        """Return the key of the cell among all cells of its sweep."""
        return self.configuration.label, self.users, self.round

    @property
    def is_warm_up(self) -> bool:
        """Return whether the result is thrown away."""
        return self.round == WARM_UP_ROUND


def interleave(configurations: Sequence[Configuration], users: Sequence[int], num_rounds: int) -> list[Cell]:
    """Return all cells in the order in which they run, the warm-up round first.

    A shared machine drifts within minutes, so configurations that are compared run right after one another. Their order
    is drawn again for every round and load: were it fixed or rotated, each would always follow the same other one, and
    what that leaves behind (a warm cache, a lowered clock) would count as a property of its successor. Equal arguments
    give equal orders.
    """
    cells = []
    for round_index in range(WARM_UP_ROUND, num_rounds):
        for count in users:
            shuffle = random.Random(f"{SEED}, round {round_index}, {load_label(count)}")
            order = shuffle.sample(configurations, len(configurations))
            cells += [Cell(c, count, round_index, position) for position, c in enumerate(order)]
    return cells


def still_to_measure(cells: Sequence[Cell], measured: Container[CellKey]) -> list[Cell]:
    """Return the cells that have no row yet, after the warm-up of every configuration and load among them."""
    open_cells = [cell for cell in cells if not cell.is_warm_up and cell.key not in measured]
    warmed = {(cell.configuration.label, cell.users) for cell in open_cells}
    warm_ups = [cell for cell in cells if cell.is_warm_up and (cell.configuration.label, cell.users) in warmed]
    return [*warm_ups, *open_cells]


def load_label(users: int) -> str:
    """Return the name of a number of users in tables."""
    return f"{users} user{'' if users == 1 else 's'}"
