"""A whole sweep: servers, cells in their order, files."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from serving.client import Reply, Sampling, ask_all
from serving.configurations import BUILTIN, Configuration
from serving.counters import CpuTime, read_accept_length, read_counters
from serving.fleet import Fleet
from serving.output import Output
from serving.prompts import Prompt, load_mixed_prompts, round_prompts
from serving.row import Observation, Sla, SweepRow, make_row
from serving.schedule import Cell, Load, interleave, poisson_arrivals, still_to_measure
from sglang_dspark.errors import ConfigError
from sglang_dspark.tools import provenance
from sglang_dspark.tools.launch import CPU_ENV, CPU_FLAGS, LaunchedServer

CPU_MAX_REQUESTS = 16
"""Requests that ``CPU_FLAGS`` admit; a sweep with more users raises the limit."""

PROMPTS_PER_USER = 2

SETTLE_PROMPT = Prompt(-1, "Count from one to twenty.")
SETTLE_TOKENS = 16

WARM_UP_S = 5.0
"""Arrivals of an open loop that a warm-up round takes."""


@dataclass(frozen=True)
class Sweep:
    """The measurements to make.

    Attributes:
        target, draft: checkpoint folders.
        device: ``cpu`` or ``cuda``.
        loads: load points.
        num_rounds: recorded rounds per configuration and load.
        num_prompts: prompts per round, at least; every user gets :data:`PROMPTS_PER_USER` or more.
        rate_seconds: how long requests arrive in a round of an open loop, at least.
        server_flags: further arguments of every server.
    """

    target: str
    draft: str | None
    device: str
    configurations: list[Configuration]
    loads: list[Load]
    num_rounds: int
    num_prompts: int
    rate_seconds: float
    prompts_paths: tuple[Path, ...]
    sampling: Sampling
    sla: Sla
    server_flags: tuple[str, ...]

    def servers(self, labels: set[str]) -> dict[str, LaunchedServer]:
        """Return the servers of some configurations by label, not started yet."""
        # Configurations that differ in their policy alone share a server.
        shared: dict[object, LaunchedServer] = {}
        by_label = {}
        for configuration in (c for c in self.configurations if c.label in labels):
            process = (self.flags(configuration), *configuration.environment.items())
            if process not in shared:
                shared[process] = self._launched(configuration)
            by_label[configuration.label] = shared[process]
        return by_label

    def flags(self, configuration: Configuration) -> tuple[str, ...]:
        """Return the arguments of the configuration's server.

        Raises:
            ConfigError: it cannot run.
        """
        if configuration.policy == BUILTIN and self.device == "cpu":
            raise ConfigError(
                f"--config {configuration.label}: SGLang's own DSPARK does not run on a CPU (its cache allocation and"
                " verification are Triton kernels); pass --device cuda, or leave it out"
            )
        return (*configuration.server_flags(self.draft), *self.server_flags)

    def cells(self) -> list[Cell]:
        """Return all cells in their order, the warm-up round first."""
        return interleave(self.configurations, self.loads, self.num_rounds)

    def num_prompts_of(self, cell: Cell) -> int:
        """Return the number of prompts of a cell. A warm-up round only has to see every batch size once."""
        users, rate = cell.load.concurrency, cell.load.rate
        if rate is not None:
            seconds = WARM_UP_S if cell.is_warm_up else self.rate_seconds
            return max(2 if cell.is_warm_up else self.num_prompts, math.ceil(rate * seconds))
        assert users is not None, "a load has users or a rate"
        return users if cell.is_warm_up else max(self.num_prompts, PROMPTS_PER_USER * users)

    def describe(self) -> dict[str, Any]:
        """Return the ``provenance.json`` of a sweep that starts now."""
        return {
            **provenance.record(),
            "started": datetime.now(UTC).isoformat(timespec="seconds"),
            "finished": None,
            "changes": provenance.changes_digest(),
            "target": _name(self.target),
            "draft": _name(self.draft),
            "device": self.device,
            # More users later would mean other servers.
            "cpu_flags": [*CPU_FLAGS, *self._admitted()] if self.device == "cpu" else None,
            "prompts": provenance.files(self.prompts_paths),
            "num_prompts": self.num_prompts,
            "rate_seconds": self.rate_seconds,
            "sampling": asdict(self.sampling),
            "sla": asdict(self.sla),
            "configurations": {
                c.label: {
                    "server_flags": [provenance.portable(flag) for flag in self.flags(c)],
                    "environment": c.environment,
                    "policy": c.policy_fields,
                }
                for c in self.configurations
            },
        }

    def _launched(self, configuration: Configuration) -> LaunchedServer:
        flags = self.flags(configuration)
        if self.device == "cpu":
            return LaunchedServer(
                self.target, *CPU_FLAGS, *self._admitted(), *flags, env={**CPU_ENV, **configuration.environment}
            )
        return LaunchedServer(self.target, *flags, env=configuration.environment)

    def _admitted(self) -> tuple[str, str]:
        limit = max([CPU_MAX_REQUESTS, *(load.concurrency or 0 for load in self.loads)])
        return "--max-running-requests", str(limit)


def run_sweep(sweep: Sweep, folder: Path, console: Console) -> None:
    """Measure what ``folder`` does not hold yet, and write the files that sweep_concurrency.py lists.

    Raises:
        ConfigError: options, prompts or earlier results cannot work.
        LaunchError: a server did not start, failed a request or died.
    """
    prompts = load_mixed_prompts(sweep.prompts_paths)
    output = Output(folder, sweep.describe())
    cells = still_to_measure(sweep.cells(), output.measured)
    if output.measured:
        open_cells = sum(not cell.is_warm_up for cell in cells)
        console.print(f"{len(output.measured)} cells are measured already, {open_cells} are left", highlight=False)
    servers = sweep.servers({cell.configuration.label for cell in cells})
    with _progress(console) as progress:
        progress.add_task("starting servers", total=None)
        say = partial(progress.console.print, highlight=False)
        with Fleet(servers, lambda label: say(f"starting {label}")) as fleet:
            for cell, row, replies in _measure_all(sweep, cells, prompts, fleet, progress):
                output.write(cell, row, replies)
                say(_line(row, cell.load))
    output.finish()


def _measure_all(
    sweep: Sweep, cells: Sequence[Cell], prompts: Sequence[Prompt], fleet: Fleet, progress: Progress
) -> Iterator[tuple[Cell, SweepRow, list[Reply]]]:
    """Measure cell by cell; the warm-up round is left out of the results."""
    task = progress.task_ids[0]
    progress.reset(task, total=len(cells))
    for cell in cells:
        kind = "warm-up" if cell.is_warm_up else f"round {cell.round}"
        progress.update(task, description=f"{kind}, {cell.load}, {cell.configuration.label}")
        chosen = round_prompts(prompts, cell.round, sweep.num_prompts_of(cell))
        on_reply = partial(progress.advance, task, 1 / len(chosen))
        row, replies = _measure(sweep, cell, chosen, fleet, on_reply)
        if not cell.is_warm_up:
            yield cell, row, replies


def _measure(
    sweep: Sweep,
    cell: Cell,
    prompts: Sequence[Prompt],
    fleet: Fleet,
    on_reply: Callable[[], None],
) -> tuple[SweepRow, list[Reply]]:
    configuration = cell.configuration
    with fleet.awake(configuration.label) as server:
        if configuration.policy_fields is not None:
            server.post_json("/dspark/policy", configuration.policy_fields)
        _settle(server, sweep.sampling, cell.load.concurrency or 1)
        counts_before, cpu_before = read_counters(server, configuration), CpuTime.read(server.pid)
        users, rate, arrivals_s = cell.load.concurrency, cell.load.rate, None
        if rate is not None:
            arrivals_s = poisson_arrivals(rate, len(prompts), seed=(cell.round + 1, round(1e6 * rate)))
        replies = ask_all(server.url, prompts, sweep.sampling, users=users, arrivals_s=arrivals_s, on_reply=on_reply)
        cpu_time = CpuTime.read(server.pid) - cpu_before
        counts_after, accept_length = read_counters(server, configuration), read_accept_length(server, configuration)
    counts = None
    if counts_before is not None and counts_after is not None:
        counts = {name: counts_after[name] - counts_before[name] for name in counts_after}
    return make_row(cell, replies, Observation(cpu_time, counts, accept_length), sweep.sla), replies


def _settle(server: LaunchedServer, sampling: Sampling, users: int) -> None:
    """Throw away a short answer per user, and empty the prefix cache.

    A server that has just been woken up, or has changed its policy, is not yet what it is measured as.
    """
    short = replace(sampling, max_tokens=min(SETTLE_TOKENS, sampling.max_tokens))
    ask_all(server.url, [SETTLE_PROMPT] * users, short)
    server.flush_cache()


def _line(row: SweepRow, load: Load) -> str:
    accept = f", accept length {row.accept_length:.2f}" if row.accept_length else ""
    goodput = f", {row.sla_met_share:.0%} within the SLA" if row.sla_met_share is not None else ""
    others = row.other_cpu_share
    return (
        f"round {row.round}, {load!s:>9}, {row.config}: {row.output_tok_s:.1f} tok/s, "
        f"{row.per_user_tok_s:.1f} per user{accept}{goodput}"
        f"{f' (others used {others:.0%} of the CPU)' if others > 0.1 else ''}"
    )


def _progress(console: Console) -> Progress:
    columns = (BarColumn(), TextColumn("{task.description}"), TimeElapsedColumn(), TimeRemainingColumn())
    return Progress(*columns, console=console, transient=True)


def _name(path: str | None) -> str:
    return Path(path).resolve().name if path else ""
