"""The simulator against a sweep of real servers (benchmarks/sweep_concurrency.py)."""

from __future__ import annotations

import csv
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

from sglang_dspark.errors import ConfigError
from sglang_dspark.scheduling.sps_table import SpsTable
from sglang_dspark.tools.simulator.blocks import BlockSource, ConditionalAcceptance
from sglang_dspark.tools.simulator.costs import Costs, Prefill
from sglang_dspark.tools.simulator.sweep import Conditions, simulate_point
from sglang_dspark.tools.simulator.workload import Lengths

# Simulations per point, each with dice of its own: the error of their mean is below 1 %.
_REPEATS = 4
# Of a step's time, in logarithms: what the rounds of one server differ by within a quiet minute.
_NOISE = 0.03
_NUMBERS = ("concurrency", "output_tok_s", "ttft_ms", "itl_p50_ms", "num_requests", "num_tokens", "num_prompt_tokens")
_COUNTS = ("accepted", "decode_rounds")
_MEASURED = ("policy", "users", "tok_s", "slowest", "fastest", "ttft_ms", "step_ms")
_ERRORS = ("error", "slowdown", "error_at_speed")

Row = dict[str, Any]


@dataclass(frozen=True)
class Measured:
    """All rounds of one configuration at one concurrency; medians over the rounds.

    Attributes:
        policy: as the simulator names it; ``plain`` for the server without the plugin.
        slowest, fastest: the least and the most ``tok_s`` of a round.
        step_ms: median time between two pieces of a stream: a decode step, or for ``plain`` that of one token.
        accepted_per_round: the accept length beyond the one token that is for sure; NaN for ``plain``.
    """

    policy: str
    users: int
    tok_s: float
    slowest: float
    fastest: float
    ttft_ms: float
    step_ms: float
    num_requests: int
    prompt_tokens: int
    output_tokens: int
    accepted_per_round: float


@dataclass(frozen=True)
class Comparison:
    """A point of the sweep beside its simulation.

    Attributes:
        tok_s, ttft_ms, step_ms: simulated.
        error: simulated over measured throughput, minus 1.
        slowdown: measured over simulated step time: how much slower or faster the machine was than the table says.
        error_at_speed: what is left of the error when that is taken out, thus the error of everything but step times.
    """

    measured: Measured
    tok_s: float
    ttft_ms: float
    step_ms: float

    @property
    def error(self) -> float:
        return self.tok_s / self.measured.tok_s - 1

    @property
    def slowdown(self) -> float:
        return self.measured.step_ms / self.step_ms

    @property
    def error_at_speed(self) -> float:
        # If everything takes longer by a factor, throughput falls by it.
        return self.tok_s / self.slowdown / self.measured.tok_s - 1


def read_sweep(path: Path, dtype: str | None = None) -> list[Measured]:
    """The points of a ``sweep.csv``, by concurrency.

    Args:
        dtype: that of the step times: rows of servers in another one are left out. None takes all.

    Raises:
        ConfigError: it is none, or has no such rows.
    """
    try:
        with path.open(newline="", encoding="utf-8") as file:
            rows = [_numbers(row) for row in csv.DictReader(file)]
    except (OSError, ValueError, KeyError) as error:
        raise ConfigError(f"--check {path}: {error!r}; give a sweep.csv of benchmarks/sweep_concurrency.py") from error
    rows = [row for row in rows if dtype in (None, row["dtype"])]
    if not rows:
        raise ConfigError(
            f"--check {path} has no rows of {dtype or 'any'} servers; give a sweep.csv of "
            "benchmarks/sweep_concurrency.py and a table of the same dtype"
        )

    def place(row: Row) -> tuple[int, str]:
        return int(row["concurrency"]), row["policy"]

    rows.sort(key=place)
    return [_measured(policy, users, list(group)) for (users, policy), group in groupby(rows, key=place)]


def _numbers(row: Row) -> Row:
    numbers = {name: float(row[name]) for name in _NUMBERS}
    counts = {name: float(row[name] or "nan") for name in _COUNTS}
    policy = row["policy"]
    if policy == "static":
        policy = f"static:{int(row['verify_len'])}"
    elif policy == "threshold":  # whose argument stands in the label alone
        policy = row["config"].partition("@")[0].rpartition("=")[2]
    return {"policy": policy, "dtype": row["dtype"], **numbers, **counts}


def _measured(policy: str, users: int, rows: Sequence[Row]) -> Measured:
    def total(name: str) -> float:
        return sum(row[name] for row in rows)

    tok_s = [row["output_tok_s"] for row in rows]
    return Measured(
        policy=policy,
        users=users,
        tok_s=median(tok_s),
        slowest=min(tok_s),
        fastest=max(tok_s),
        ttft_ms=median(row["ttft_ms"] for row in rows),
        step_ms=median(row["itl_p50_ms"] for row in rows),
        num_requests=round(median(row["num_requests"] for row in rows)),
        prompt_tokens=round(total("num_prompt_tokens") / total("num_requests")),
        output_tokens=round(total("num_tokens") / total("num_requests")),
        accepted_per_round=total("accepted") / total("decode_rounds"),
    )


def acceptance(points: Sequence[Measured]) -> dict[int, ConditionalAcceptance]:
    """By users: conditional acceptance, from the accept lengths of ``static:1``, ``static:2`` ... of the same prompts.

    One draft more is worth its survival, so consecutive lengths differ by the survival of the longer one's last draft.

    Raises:
        ConfigError: the sweep has no such configurations.
    """
    found = {}
    for users in sorted({point.users for point in points}):
        lengths = {p.policy: p.accepted_per_round for p in points if p.users == users}
        gamma = next((n for n in range(64) if f"static:{n + 1}" not in lengths), 0)
        if gamma == 0:
            raise ConfigError(f"the sweep has no static:1, static:2 ... at {users} users; give --blocks")
        survival = np.diff([0.0, *(lengths[f"static:{n}"] for n in range(1, gamma + 1))])
        # Each length is measured on its own, so a small survival may come out above the one before, or negative.
        survival = np.minimum.accumulate(np.clip(survival, 1e-3, 1.0))
        conditional = survival / np.concatenate([[1.0], survival[:-1]])
        found[users] = ConditionalAcceptance(tuple(conditional.tolist()), name="accept lengths of the sweep")
    return found


def host_ms(points: Sequence[Measured], table: SpsTable) -> float:
    """Time of a step beyond the table's: the median over the fixed lengths of the fewest users."""
    fewest = min(point.users for point in points)
    extra = []
    for point in points:
        policy, _, drafts = point.policy.partition(":")
        if point.users == fewest and policy == "static" and drafts:
            context = point.prompt_tokens + point.output_tokens / 2
            tokens = fewest * (1 + int(drafts))
            extra.append(point.step_ms - table.step_ms(fewest, tokens, int(drafts), context))
    return max(0.0, median(extra)) if extra else 0.0


def compare(
    points: Sequence[Measured],
    table: SpsTable,
    blocks: BlockSource | None = None,
    prefill: Prefill | None = None,
    on_point: Callable[[], None] = lambda: None,
) -> list[Comparison]:
    """Simulate every point of a sweep.

    Args:
        blocks: where drafts come from; None takes the accept lengths of the sweep itself.
        prefill: its cost; None takes what the table says.
    """
    known = {} if blocks else acceptance(points)
    gap = host_ms(points, table)
    plain = sorted((point.users, point.step_ms) for point in points if point.policy == "plain")
    costs = Costs(table, prefill or Prefill.from_table(table), gap, _NOISE)
    comparisons = []
    for point in points:
        conditions = Conditions(
            # The server without the plugin has attention of its own: its step times are the sweep's.
            replace(costs, plain_ms=plain) if point.policy == "plain" else costs,
            blocks or known[point.users],
            Lengths(point.prompt_tokens, point.prompt_tokens),
            Lengths(point.output_tokens, point.output_tokens),
            num_requests=point.num_requests,
            repeats=_REPEATS,
        )
        policy = "off" if point.policy == "plain" else point.policy
        figures = simulate_point(conditions, policy, users=point.users)[0].figures
        comparisons.append(Comparison(point, figures.output_tok_s, figures.ttft_ms, figures.step_ms))
        on_point()
    return comparisons


def write_csv(path: Path, comparisons: Sequence[Comparison]) -> None:
    """One line per point."""
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow([*_MEASURED, "simulated_tok_s", "simulated_ttft_ms", "simulated_step_ms", *_ERRORS])
        for comparison in comparisons:
            measured = [getattr(comparison.measured, name) for name in _MEASURED]
            simulated = [comparison.tok_s, comparison.ttft_ms, comparison.step_ms]
            errors = [getattr(comparison, name) for name in _ERRORS]
            writer.writerow([f"{v:.6g}" if isinstance(v, float) else v for v in (*measured, *simulated, *errors)])
