"""Policies side by side in simulated time, over the number of users or the rate of arrivals."""

from __future__ import annotations

import csv
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, fields, replace
from itertools import product
from pathlib import Path
from statistics import fmean

from sglang_dspark.config import POLICY_NAMES, DSparkConfig
from sglang_dspark.errors import ConfigError
from sglang_dspark.tools.simulator.blocks import BlockSource
from sglang_dspark.tools.simulator.costs import Costs, perturbed
from sglang_dspark.tools.simulator.outcome import Figures, Outcome
from sglang_dspark.tools.simulator.server import SimulatedServer
from sglang_dspark.tools.simulator.workload import Lengths, Workload

# Requests per user, and at least so many; half as many warm the schedule up.
REQUESTS_PER_USER, FEWEST_REQUESTS = 4, 32


def parse_policy(text: str) -> DSparkConfig:
    """Options of ``auto``, ``early-stop``, ``off``, ``static:3`` or ``threshold:0.6``.

    Raises:
        ConfigError: it is none of them.
    """
    name, _, argument = text.partition(":")
    known = {"static": "verify_len", "threshold": "confidence_threshold"}
    if name not in POLICY_NAMES or (argument and name not in known):
        raise ConfigError(
            f"--policies: {text!r} is no policy; give some of auto, early-stop, off, static:N and threshold:P, with "
            "commas between them"
        )
    fields_ = {"policy": name}
    if not argument:
        return DSparkConfig().with_policy(fields_)
    try:
        value = int(argument) if name == "static" else float(argument)
    except ValueError as error:
        raise ConfigError(f"--policies: {argument!r} in {text!r} is no number") from error
    return DSparkConfig().with_policy({**fields_, known[name]: value})


@dataclass(frozen=True)
class Conditions:
    """What all points of a sweep have in common; see :class:`SimulatedServer` and :class:`Workload`.

    Attributes:
        table_error: true step times differ from the scheduler's by so much, a standard deviation of logarithms. Every
            repeat has errors of its own.
    """

    costs: Costs
    blocks: BlockSource
    prompt: Lengths
    output: Lengths
    num_requests: int | None = None
    overlap: bool = True
    max_running: int = 256
    turnaround_ms: float = 0.0
    transit_ms: float = 0.0
    apart_ms: float = 0.0
    repeats: int = 1
    seed: int = 0
    table_error: float = 0.0

    def workload(self, users: int | None, rate: float | None) -> Workload:
        """So many requests as :attr:`num_requests` says, or enough for every user."""
        count = self.num_requests or max(FEWEST_REQUESTS, REQUESTS_PER_USER * (users or 0))
        return Workload(
            count, self.prompt, self.output, users, rate, self.turnaround_ms, self.transit_ms, self.apart_ms
        )


@dataclass(frozen=True)
class Point:
    """One policy at one load: ``users``, or arrivals per second ``rate``."""

    policy: str
    users: int | None
    rate: float | None
    figures: Figures


def simulate_point(
    conditions: Conditions, policy: str, users: int | None = None, rate: float | None = None, lanes: int = 0
) -> tuple[Point, Outcome]:
    """Warm the schedule up, as a server that has been running, and measure.

    Args:
        lanes: steps to keep in detail.

    Returns:
        The figures, and the last repeat.
    """
    workload = conditions.workload(users, rate)
    outcomes = []
    for repeat in range(conditions.repeats):
        costs = conditions.costs
        if conditions.table_error:
            true = perturbed(costs.table, conditions.table_error, conditions.seed + repeat)
            costs = replace(costs, table=true, believed=costs.believed or costs.table)
        server = SimulatedServer(
            costs,
            conditions.blocks,
            parse_policy(policy),
            overlap=conditions.overlap,
            max_running=conditions.max_running,
            seed=conditions.seed + repeat,
            lanes=lanes,
        )
        if not policy.startswith(("static", "off")):
            server.serve(replace(workload, num_requests=-(-workload.num_requests // 2)))
        outcomes.append(server.serve(workload))
    return Point(policy, users, rate, mean_figures([outcome.figures() for outcome in outcomes])), outcomes[-1]


def sweep(
    conditions: Conditions,
    policies: Sequence[str],
    users: Sequence[int] = (),
    rates: Sequence[float] = (),
    on_point: Callable[[], None] = lambda: None,
) -> list[Point]:
    """Every policy at every load."""
    loads: list[tuple[int | None, float | None]] = [*((count, None) for count in users), *((None, r) for r in rates)]
    points = []
    for policy, (count, rate) in product(policies, loads):
        points.append(simulate_point(conditions, policy, count, rate)[0])
        on_point()
    return points


def mean_figures(several: Sequence[Figures]) -> Figures:
    """Their means."""
    return Figures(**{f.name: fmean(getattr(figures, f.name) for figures in several) for f in fields(Figures)})


def write_csv(path: Path, points: Sequence[Point]) -> None:
    """One line per point; units as in :class:`Figures`."""
    with path.open("w", newline="", encoding="utf-8") as file:
        columns = ["policy", "users", "rate", *(f.name for f in fields(Figures))]
        writer = csv.DictWriter(file, columns, lineterminator="\n")
        writer.writeheader()
        for point in points:
            figures = {name: f"{value:.6g}" for name, value in asdict(point.figures).items()}
            writer.writerow({"policy": point.policy, "users": point.users, "rate": point.rate, **figures})
