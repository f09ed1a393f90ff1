"""Set the load of a sweep's servers and the order of its measurements."""

from __future__ import annotations

import random
from collections.abc import Container, Sequence
from dataclasses import dataclass
from typing import Annotated

import numpy as np

from serving.configurations import Configuration
from sglang_dspark.declared import int_range
from sglang_dspark.tools.cli.numbers import Numbers

DEFAULT_CONCURRENCY = "1,2,4,8"
USERS = Numbers(Annotated[int, int_range(1)], distinct=True)
"""Kind of the option ``--concurrency``."""
WARM_UP_ROUND = -1
SEED = 0


@dataclass(frozen=True)
class Load:
    """One load point: exactly one of the two is given.

    Attributes:
        concurrency: closed loop: users; each sends the next prompt when its last answer is complete. The load
            follows the server: a slow one is asked less.
        rate: open loop: requests per second that arrive as a Poisson process, however slow the server is.
    """

    concurrency: int | None = None
    rate: float | None = None

    def __str__(self) -> str:
        """Return its name in tables, e.g. ``8 users`` or ``2 req/s``."""
        return load_label(self.concurrency, self.rate)


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
        """Return the key of the cell among all cells of its sweep."""
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


def load_label(concurrency: int | None, rate: float | None) -> str:
    """Return the name of a load point in tables."""
    if rate is not None:
        return f"{rate:g} req/s"
    return f"{concurrency} user{'' if concurrency == 1 else 's'}"


def loads(concurrencies: Sequence[int], rates: Sequence[float]) -> list[Load]:
    """Return load points in the order in which they are measured: users first."""
    return [*(Load(concurrency=users) for users in concurrencies), *(Load(rate=rate) for rate in rates)]


def poisson_arrivals(rate: float, num_requests: int, seed: Sequence[int]) -> list[float]:
    """Return the arrival times in seconds from the start of a round, the first one at 0.

    The gaps of a Poisson process are independent and exponential with mean ``1 / rate``. Equal arguments give equal
    times: every configuration of a round meets the same arrivals.

    Args:
        rate: requests per second.
        num_requests: how many arrive.
        seed: whole numbers; others give other times.
    """
    gaps_s = np.random.default_rng(seed).exponential(1 / rate, num_requests)
    return (np.cumsum(gaps_s) - gaps_s[0]).tolist()
