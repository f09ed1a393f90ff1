"""Host time of the scheduler per decode step: the choice before it, the selection in it, and what is learned after it.

    python benchmarks/bench_planning.py
    python benchmarks/bench_planning.py --requests 256 --gamma 15 --output RESULTS/planning.json

A server's schedule runs on made-up step times and survivals; every step times all parts once, so that a busy moment of
the machine meets all of them alike. The two drafters take turns from block to block of steps: with one of them a
shallow block is as expensive as a whole one (a GPU), with the other every draft costs, and all depths are weighed.
Device work is not part of it: selection runs on the CPU here.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

import click
import numpy as np
import torch
from dspark_kernels import DraftBlock
from rich.console import Console
from rich.table import Table

from sglang_dspark.calibration.online import OnlineCalibration
from sglang_dspark.config import DSparkConfig
from sglang_dspark.scheduling.schedule import Schedule
from sglang_dspark.scheduling.sps_table import SpsTable, geometric_grid
from sglang_dspark.scheduling.step_times import StepKind
from sglang_dspark.step.state import Drafted, Rounds
from sglang_dspark.tools import provenance

STEPS_PER_TURN = 50
WARM_UP_TURNS = 4
CONTEXT = 500.0

T = TypeVar("T")


class Server:
    """A schedule under load, without a model.

    Attributes:
        samples: nanoseconds by part.
    """

    def __init__(self, requests: int, gamma: int, draft_slope_ms: float) -> None:
        grid = np.meshgrid(geometric_grid(requests), np.arange(gamma + 1.0), [64.0, 1024.0], indexing="ij")
        users, drafts, contexts = grid
        table = SpsTable(
            key={},
            requests=geometric_grid(requests),
            drafts=range(gamma + 1),
            contexts=[64, 1024],
            draft_ms=np.where(drafts > 0, 2.0 + draft_slope_ms * users * drafts, 0.0),
            verify_ms=10.0 + 0.02 * users * (1 + drafts) + 1e-4 * users * contexts,
        )
        self._requests, self._gamma = requests, gamma
        self._ids = [f"request-{index}" for index in range(requests)]
        self._rng = np.random.default_rng(0)
        self._schedule = Schedule(DSparkConfig(), gamma, OnlineCalibration(gamma), torch.device("cpu"))
        self._schedule.start(table)
        self._step = 0
        self.samples: dict[str, list[int]] = defaultdict(list)

    def step(self) -> None:
        """Take every part of a step once."""
        schedule, requests, times, survivals = self._schedule, self._requests, *self._knowledge()
        choice = self._timed("Schedule.choose", lambda: schedule.choose(self._ids, CONTEXT))
        depth = choice.depth
        drafted = Drafted(
            DraftBlock(torch.zeros((requests, depth), dtype=torch.int64), None, None), None, [depth] * requests
        )
        if depth > 0:
            logits = torch.from_numpy(self._rng.normal(1.5, 1.0, size=(requests, depth))).float()
            confidence = self._timed("Forecast.predict", lambda: schedule.forecast.predict(logits, requests, depth))
            drafted = replace(drafted, confidence=confidence)
        lens = self._timed("Schedule.admit", lambda: schedule.admit(choice, drafted).verify_lens)
        rounds = Rounds(self._ids, choice, drafted.depths, lens, drafted.confidence, None, [0] * requests)
        kept = np.minimum(self._rng.geometric(0.25, size=requests) - 1, lens.numpy()).tolist()
        kind = StepKind(requests, requests + int(lens.sum()), depth, CONTEXT)
        ms = times.table.step_ms(requests, kind.num_tokens, depth, CONTEXT) * self._rng.normal(1.0, 0.03)
        self._timed("StepTimes.observe", lambda: times.observe(kind, ms))
        self._timed("Schedule.observe", lambda: schedule.observe(rounds, list(range(requests)), kept))
        seen = self._rng.random((requests, self._gamma)).cumprod(1)
        self._timed("LaggedSurvivals.observe", lambda: survivals.observe(seen))
        self._step += 1

    def _knowledge(self) -> tuple[Any, Any]:
        assert self._schedule.times is not None
        assert self._schedule.forecast.lagged is not None
        return self._schedule.times, self._schedule.forecast.lagged

    def _timed(self, part: str, run: Callable[[], T]) -> T:
        before = time.perf_counter_ns()
        result = run()
        self.samples[part].append(time.perf_counter_ns() - before)
        return result


def measure(requests: int, gamma: int, num_steps: int) -> list[dict[str, Any]]:
    """One record per drafter and part, in microseconds."""
    servers = {"one depth": Server(requests, gamma, 0.0), "all depths": Server(requests, gamma, 0.01)}
    for turn in range(WARM_UP_TURNS + -(-num_steps // STEPS_PER_TURN)):
        for server in servers.values():
            if turn == WARM_UP_TURNS:
                server.samples.clear()
            for _ in range(STEPS_PER_TURN):
                server.step()
    return [
        {
            "drafter": name,
            "part": part,
            "samples": len(values),
            "mean_us": float(np.mean(values)) / 1e3,
            "median_us": float(np.median(values)) / 1e3,
            "p90_us": float(np.percentile(values, 90)) / 1e3,
        }
        for name, server in servers.items()
        for part, values in server.samples.items()
    ]


def result_table(records: list[dict[str, Any]], title: str) -> Table:
    """Records for the terminal."""
    table = Table(title=title)
    for name in ("drafter", "part"):
        table.add_column(name)
    for name in ("mean us", "median us", "p90 us"):
        table.add_column(name, justify="right")
    for record in records:
        figures = (f"{record[figure]:.1f}" for figure in ("mean_us", "median_us", "p90_us"))
        table.add_row(record["drafter"], record["part"], *figures)
    return table


@click.command(help=__doc__)
@click.option("--requests", default=64, show_default=True, help="Requests per step.")
@click.option("--gamma", default=7, show_default=True, help="Drafts per block.")
@click.option("--steps", "num_steps", default=2000, show_default=True, help="Steps per drafter.")
@click.option("--output", type=click.Path(path_type=Path), help="JSON file to write.")
def main(requests: int, gamma: int, num_steps: int, output: Path | None) -> None:
    """Command line; see the module."""
    torch.set_num_threads(1)
    with torch.inference_mode():
        records = measure(requests, gamma, num_steps)
    Console().print(result_table(records, f"{requests} requests, {gamma} drafts"))
    if output is not None:
        output.parent.mkdir(parents=True, exist_ok=True)
        document = {
            **provenance.record(),
            "requests": requests,
            "gamma": gamma,
            "parts": records,
        }
        provenance.write_json(output, document)


if __name__ == "__main__":
    main()
