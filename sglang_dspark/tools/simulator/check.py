"""The simulator against a sweep of real servers (benchmarks/sweep_concurrency.py)."""

from __future__ import annotations

import csv
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import combinations
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from sglang_dspark.scheduling.sps_table import SpsTable
from sglang_dspark.tools.simulator.blocks import BlockSource, RecordedBlocks
from sglang_dspark.tools.simulator.costs import Costs, Prefill
from sglang_dspark.tools.simulator.measured_sweep import Measured, acceptance, host_ms
from sglang_dspark.tools.simulator.sweep import Conditions, simulate_point
from sglang_dspark.tools.simulator.sweep_costs import blocks_of, costs_of, table_of
from sglang_dspark.tools.simulator.workload import Lengths

# Simulations per point, each with dice of its own: the error of their mean is below 1 %.
_REPEATS = 4
# Of a step's time, in logarithms: what the rounds of one server differ by within a quiet minute.
_NOISE = 0.03
# Between two requests that are sent together and reach the queue: an idle server takes the first one alone.
_APART_MS = 0.1
_MEASURED = ("label", "users", "tok_s", "slowest", "fastest", "ttft_ms", "step_ms", "verify_len", "accept_length")
_SIMULATED = ("tok_s", "ttft_ms", "step_ms", "verify_len", "accept_length", "error")


@dataclass(frozen=True)
class Comparison:
    """A point of the sweep beside its simulation.

    Attributes:
        tok_s, ttft_ms, step_ms, verify_len, accept_length: simulated, as in
            :class:`~sglang_dspark.tools.simulator.outcome.Figures`.
    """

    measured: Measured
    tok_s: float
    ttft_ms: float
    step_ms: float
    verify_len: float
    accept_length: float

    @property
    def error(self) -> float:
        """Simulated over measured throughput, minus 1."""
        return self.tok_s / self.measured.tok_s - 1


def compare(
    points: Sequence[Measured],
    table: SpsTable,
    blocks: BlockSource | None = None,
    prefill: Prefill | None = None,
    on_point: Callable[[], None] = lambda: None,
    *,
    true_table: SpsTable | None = None,
    table_error: float = 0.0,
    padded: bool | None = None,
) -> list[Comparison]:
    """Simulate every point of a sweep.

    Args:
        table: what the scheduler believes.
        blocks: where drafts come from; None takes the accept lengths of the sweep itself.
        prefill: its cost; None takes what the table says.
        true_table: what steps really take; None: what the scheduler believes.
        table_error: see :class:`Conditions`.
        padded: see :class:`Costs`; None: where the table has no tiers, as on a CPU.
    """
    plain = sorted((point.users, point.step_ms) for point in points if point.policy == "plain")
    costs = Costs(
        true_table or table,
        prefill or Prefill.from_table(table),
        host_ms(points, table),
        _NOISE,
        # The server without the plugin has attention of its own: its step times are the sweep's.
        plain_ms=plain,
        believed=table,
        padded=not table.tiers if padded is None else padded,
    )
    sources: Mapping[int, BlockSource] = {point.users: blocks for point in points} if blocks else acceptance(points)
    return _compare(points, costs, sources, on_point, table_error=table_error)


def compare_alone(
    points: Sequence[Measured], recorded: RecordedBlocks | None = None, on_point: Callable[[], None] = lambda: None
) -> list[Comparison]:
    """Simulate every point of a sweep by what the sweep says of its server's times, see ``sweep_costs``.

    Args:
        recorded: rounds of the same drafter; None takes one acceptance for all of them.
    """
    table = table_of(points)
    costs, transit_ms = costs_of(points, table, _NOISE)
    return _compare(
        points, costs, blocks_of(points, table.gamma, recorded), on_point, transit_ms=transit_ms, apart_ms=_APART_MS
    )


def _compare(
    points: Sequence[Measured],
    costs: Costs,
    blocks: Mapping[int, BlockSource],
    on_point: Callable[[], None],
    **options: Any,
) -> list[Comparison]:
    """Simulate every point, with the ``blocks`` of its load.

    Args:
        options: of :class:`Conditions`.
    """
    comparisons = []
    for point in points:
        is_plain = point.policy == "plain"
        conditions = Conditions(
            costs if is_plain else replace(costs, plain_ms=()),
            blocks[point.users],
            Lengths(point.prompt_tokens, point.prompt_tokens),
            Lengths(point.output_tokens, point.output_tokens),
            num_requests=point.num_requests,
            repeats=_REPEATS,
            **options,
        )
        f = simulate_point(conditions, "off" if is_plain else point.policy, users=point.users)[0].figures
        comparisons.append(Comparison(point, f.output_tok_s, f.ttft_ms, f.step_ms, f.verify_len, f.accept_length))
        on_point()
    return comparisons


def rank_correlations(comparisons: Sequence[Comparison]) -> dict[int, float]:
    """By users: Spearman's correlation of measured and simulated throughput over the policies of DSPARK.

    Plain serving is left out, since its step times are the sweep's; so are loads with fewer than three policies.
    """
    found = {}
    for users in sorted({c.measured.users for c in comparisons}):
        ours = [c for c in comparisons if c.measured.users == users and c.measured.policy != "plain"]
        if len(ours) >= 3:
            found[users] = _spearman([c.measured.tok_s for c in ours], [c.tok_s for c in ours])
    return found


def rank_ceilings(points: Sequence[Measured]) -> dict[int, float]:
    """By users: the rank correlation that a prediction without error would have with the sweep, by its own rounds.

    Half of the rounds orders the policies by their median speeds, and so does the other half. From r, the mean of
    Spearman's correlation of the two over all halves, 2 r / (1 + r) is that of all rounds with as many others
    (Spearman and Brown), and its square root that of all rounds with the truth. Loads with fewer than four rounds, or
    than three policies of DSPARK, are left out.
    """
    found = {}
    for users in sorted({point.users for point in points}):
        rates = [point.rates for point in points if point.users == users and point.policy != "plain"]
        rounds = sorted(set.intersection(*map(set, rates))) if rates else []
        if len(rates) >= 3 and len(rounds) >= 4:
            table = np.array([[rate[number] for number in rounds] for rate in rates])
            halves = combinations(range(len(rounds)), len(rounds) // 2)
            agreement = float(np.mean([_agreement(table, half) for half in halves]))
            found[users] = float(np.sqrt(max(0.0, 2 * agreement / (1 + agreement))))
    return found


def _agreement(table: NDArray[np.float64], half: Sequence[int]) -> float:
    """Rank correlation of the medians over these columns of ``[policies, rounds]`` and over the others."""
    return _spearman(np.median(table[:, half], axis=1), np.median(np.delete(table, half, axis=1), axis=1))


def _spearman(left: ArrayLike, right: ArrayLike) -> float:
    """Spearman's correlation; equal values share their ranks, and values that are all equal go with nothing."""
    first, second = (_ranks(values) for values in (left, right))
    return float(np.corrcoef(first, second)[0, 1]) if first.any() and second.any() else 0.0


def _ranks(values: ArrayLike) -> NDArray[np.float64]:
    """Ranks around their mean."""
    _, inverse, counts = np.unique(values, return_inverse=True, return_counts=True)
    ranks: NDArray[np.float64] = (np.cumsum(counts) - counts / 2)[inverse] - len(inverse) / 2
    return ranks


def write_csv(path: Path, comparisons: Sequence[Comparison]) -> None:
    """One line per point."""
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow([*_MEASURED, *(f"simulated_{name}" for name in _SIMULATED[:-1]), _SIMULATED[-1]])
        for comparison in comparisons:
            measured = [getattr(comparison.measured, name) for name in _MEASURED]
            simulated = [getattr(comparison, name) for name in _SIMULATED]
            writer.writerow([f"{v:.6g}" if isinstance(v, float) else v for v in (*measured, *simulated)])
