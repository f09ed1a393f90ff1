"""A whole sweep: servers, cells in their order, files."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any

from rich.console import Console

from serving.client import Reply, Sampling, ask_all
from serving.configurations import PLAIN, SIMULATED, Configuration
from serving.counters import CpuTime, read_accept_length, read_counters
from serving.fleet import Fleet
from serving.output import Output
from serving.profiles import record_steps
from serving.prompts import Prompt, load_mixed_prompts, round_prompts
from serving.row import SweepRow, make_row
from serving.schedule import WARM_UP_ROUND, Cell, interleave, load_label, still_to_measure
from sglang_dspark.errors import ConfigError
from sglang_dspark.tools import provenance
from sglang_dspark.tools.launch import CPU_ENV, CPU_FLAGS, LaunchedServer

CPU_MAX_REQUESTS = 16
"""Requests that ``CPU_FLAGS`` admit; a sweep with more users raises the limit."""

PROMPTS_PER_USER = 2

SETTLE_PROMPT = Prompt(-1, "Count from one to twenty.")
SETTLE_TOKENS = 16


@dataclass(frozen=True)
class Sweep:
    """The measurements to make.

    Attributes:
        target, draft: checkpoint folders.
        device: ``cpu`` or ``cuda``.
        users: numbers of users.
        num_rounds: recorded rounds per configuration and number of users.
        num_prompts: prompts per round, at least; every user gets :data:`PROMPTS_PER_USER` or more.
        server_flags: further arguments of every server.
        together: start the servers at the same time, and measure those that start.
        trace_steps: decode steps that all that speculates records with each number of users; 0 for none.
    """

    target: str
    draft: str | None
    device: str
    configurations: list[Configuration]
    users: list[int]
    num_rounds: int
    num_prompts: int
    prompts: tuple[Path, ...]
    sampling: Sampling
    server_flags: tuple[str, ...]
    together: bool = False
    trace_steps: int = 0

    def servers(self, labels: set[str]) -> dict[str, LaunchedServer]:
        """Return the servers of some configurations by label, not started yet."""
        # Configurations that differ only in their policy share a server.
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
        return (*configuration.server_flags(self.draft), *self.server_flags)

    def num_prompts_of(self, cell: Cell) -> int:
        """Return the number of prompts of a cell. A warm-up round only has to see every batch size once."""
        return cell.users if cell.is_warm_up else max(self.num_prompts, PROMPTS_PER_USER * cell.users)

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
            "prompts": provenance.files(self.prompts),
            "num_prompts": self.num_prompts,
            "sampling": asdict(self.sampling),
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
        return "--max-running-requests", str(max(CPU_MAX_REQUESTS, *self.users))


def run_sweep(sweep: Sweep, folder: Path, console: Console) -> None:
    """Measure what ``folder`` does not hold yet, and write the files that sweep_concurrency.py lists.

    Raises:
        ConfigError: options, prompts or earlier results cannot work.
        LaunchError: a server did not start, failed a request or died.
    """
    prompts = load_mixed_prompts(sweep.prompts)
    output = Output(folder, sweep.describe())
    cells = interleave(sweep.configurations, sweep.users, sweep.num_rounds)
    cells = still_to_measure(cells, output.measured)
    if output.measured:
        open_cells = sum(not cell.is_warm_up for cell in cells)
        console.print(f"{len(output.measured)} cells are measured already, {open_cells} are left", highlight=False)
    servers = sweep.servers({cell.configuration.label for cell in cells})
    say = partial(console.print, highlight=False)
    steps = EqualSteps()
    with Fleet(servers, lambda label: say(f"starting {label}"), together=sweep.together) as fleet:
        for label, error in fleet.failed.items():
            say(f"goes on without {label}: {error}")
        cells = [cell for cell in cells if cell.configuration.label not in fleet.failed]
        for number, cell in enumerate(cells):
            chosen = round_prompts(prompts, cell.round, sweep.num_prompts_of(cell))
            row, replies = _measure(sweep, cell, chosen, fleet)
            steps.see(cell, replies)
            if not cell.is_warm_up:
                output.write(cell, row, replies)
            say(f"{number + 1} of {len(cells)}: {_line(row)}")
        traced = sweep.trace_steps and [c for c in cells if c.is_warm_up and c.configuration.policy != PLAIN]
        for cell in traced or ():
            _trace(sweep, cell, round_prompts(prompts, 0, cell.users), fleet, folder / "traces")
    for error in fleet.failed.values():
        raise error
    output.finish()


def _trace(sweep: Sweep, cell: Cell, prompts: Sequence[Prompt], fleet: Fleet, folder: Path) -> None:
    name = re.sub(r"[^\w.-]+", "_", f"{cell.configuration.label}_{cell.users}")
    activity = "CPU" if sweep.device == "cpu" else "GPU"
    with _as_configured(cell, fleet) as server:
        record_steps(server, prompts, sweep.sampling, sweep.trace_steps, activity, folder / name)


class EqualSteps:
    """Checks that servers which verify whole blocks keep the same drafts, where acceptance is simulated.

    Then they take the same steps for every request, and their times can be compared. If they do not, one of them does
    not draw by the rule that all share, see ``dspark_kernels.acceptance.simulation``.
    """

    def __init__(self) -> None:
        self._known: dict[tuple[object, ...], tuple[str, tuple[int, ...]]] = {}

    def see(self, cell: Cell, replies: Sequence[Reply]) -> None:
        """Compare the answers of a cell with those of other servers to the same prompts.

        Raises:
            ConfigError: a request took other steps, or its server does not tell.
        """
        label, rates = cell.configuration.label, cell.configuration.simulated_steps
        for place, reply in enumerate(() if rates is None else replies):
            other, kept = self._known.setdefault((rates, cell.users, cell.round, place), (label, reply.kept))
            if not reply.kept or kept != reply.kept:
                raise ConfigError(
                    f"with {load_label(cell.users)}, {label} and {other} answered prompt {reply.prompt_index} in "
                    f"{list(reply.kept)} and {list(kept)} steps that kept 0, 1, ... drafts. Both simulate acceptance "
                    "of whole blocks and should take the same steps, so their times cannot be compared; see that the "
                    f"plugin is installed for both, and that {SIMULATED} has a rate for each draft of a block"
                )


def _measure(sweep: Sweep, cell: Cell, prompts: Sequence[Prompt], fleet: Fleet) -> tuple[SweepRow, list[Reply]]:
    configuration = cell.configuration
    with _as_configured(cell, fleet) as server:
        _settle(server, sweep.sampling, cell.users)
        counts_before, cpu_before = read_counters(server, configuration), CpuTime.read(server.pid)
        replies = ask_all(server.url, prompts, sweep.sampling, cell.users)
        cpu_time = CpuTime.read(server.pid) - cpu_before
        counts_after, accept_length = read_counters(server, configuration), read_accept_length(server, configuration)
    counts = None
    if counts_before is not None and counts_after is not None:
        counts = {name: counts_after[name] - counts_before[name] for name in counts_after}
    return make_row(cell, replies, cpu_time, counts, accept_length), replies


@contextmanager
def _as_configured(cell: Cell, fleet: Fleet) -> Iterator[LaunchedServer]:
    configuration = cell.configuration
    with fleet.awake(configuration.label) as server:
        if configuration.policy_fields is not None:
            server.post_json("/dspark/policy", configuration.policy_fields)
        yield server


def _settle(server: LaunchedServer, sampling: Sampling, users: int) -> None:
    """Throw away a short answer per user, and empty the prefix cache.

    A server that has just been woken up, or has changed its policy, is not yet what it is measured as.
    """
    short = replace(sampling, max_tokens=min(SETTLE_TOKENS, sampling.max_tokens))
    ask_all(server.url, [SETTLE_PROMPT] * users, short, users)
    server.flush_cache()


def _line(row: SweepRow) -> str:
    accept = f", accept length {row.accept_length:.2f}" if row.accept_length else ""
    others = f" (others used {row.other_cpu_share:.0%} of the CPU)" if row.other_cpu_share > 0.1 else ""
    kind = "warm-up" if row.round == WARM_UP_ROUND else f"round {row.round}"
    return f"{kind}, {load_label(row.concurrency)}, {row.config}: {row.output_tok_s:.1f} tok/s{accept}{others}"


def _name(path: str | None) -> str:
    return Path(path).resolve().name if path else ""
