r"""Plain serving and DSPARK policies side by side, at several concurrencies, on one set of prompts.

    python benchmarks/sweep_concurrency.py --target TARGET --draft DRAFT --prompts PROMPTS.jsonl --output RESULTS \
        --config plain --config static:7 --config static:3 --concurrency 1,2,4,8 --rounds 6

A configuration is ``[NAME=]POLICY[:ARGUMENT][@DTYPE] [SERVER FLAGS]``, e.g. ``static:3@float32`` or
``"small=static:5 --speculative-dspark-block-size 5"``. The same one under two names (``--config plain --config
again=plain``) shows how much of a difference is noise.

DSPARK configurations with equal flags share one server, which is told its policy before each cell. Every server is
started once. All configurations run one after another on the same prompts before the next concurrency and then the next
round, so that drift of the machine meets all of them alike; idle servers are suspended. RESULTS gets
``sweep.csv`` (one row per configuration, concurrency and round), ``requests.jsonl`` (every answer with its times),
``agreement.json`` (texts against the baseline's) and ``provenance.json``. Read them with paired_ratio.py and
plot_sweep.py.
"""

from __future__ import annotations

import signal
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any

import click
from paired_ratio import frame_baselines, paired_ratios, ratio_table, read_sweep, summarise
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Table
from serving.agreement import Agreement, compare
from serving.client import Reply, Sampling, ask_all
from serving.configurations import GRAMMAR, Configuration, choose_baselines, parse_configurations
from serving.cpu_time import CpuTime
from serving.fleet import Fleet
from serving.prompts import Prompt, load_mixed_prompts, round_prompts
from serving.request_log import RequestLog
from serving.row import STAT_KEYS, Origin, RowWriter, SweepRow, make_row
from serving.schedule import Cell, interleave

from sglang_dspark import provenance
from sglang_dspark.errors import DSparkError
from sglang_dspark.launch import CPU_ENV, CPU_FLAGS, LaunchedServer

CPU_MAX_REQUESTS = 16
"""Requests that ``CPU_FLAGS`` admit; a sweep with more users raises the limit."""

PROMPTS_PER_USER = 2

SHOWN = ("output_tok_s", "server_cpu_ms_per_tok")
"""Metrics whose ratios are printed at the end of a sweep."""


@dataclass(frozen=True)
class Sweep:
    """What to measure.

    Attributes:
        target, draft: checkpoint folders.
        device: ``cpu`` or ``cuda``.
        concurrencies: numbers of users.
        num_rounds: recorded rounds per configuration and concurrency.
        num_prompts: prompts per round, at least; every user gets :data:`PROMPTS_PER_USER` or more.
        server_flags: further arguments of every server.
    """

    target: str
    draft: str | None
    device: str
    configurations: list[Configuration]
    concurrencies: list[int]
    num_rounds: int
    num_prompts: int
    prompts_paths: tuple[Path, ...]
    sampling: Sampling
    server_flags: tuple[str, ...]

    def servers(self) -> dict[str, LaunchedServer]:
        """The servers by configuration label, not started yet."""
        by_flags = {flags: self._server(flags) for flags in dict.fromkeys(map(self.flags, self.configurations))}
        return {c.label: by_flags[self.flags(c)] for c in self.configurations}

    def flags(self, configuration: Configuration) -> tuple[str, ...]:
        """Arguments of the configuration's server."""
        return (*configuration.server_flags(self.draft), *self.server_flags)

    def _server(self, flags: tuple[str, ...]) -> LaunchedServer:
        if self.device == "cpu":
            limit = str(max(CPU_MAX_REQUESTS, *self.concurrencies))
            return LaunchedServer(self.target, *CPU_FLAGS, "--max-running-requests", limit, *flags, env=CPU_ENV)
        return LaunchedServer(self.target, *flags)

    def origin(self) -> Origin:
        """Columns that say where the rows come from."""
        return Origin(
            prompt_set="+".join(path.stem for path in self.prompts_paths),
            model=Path(self.target).resolve().name,
            draft=Path(self.draft).resolve().name if self.draft else "",
            commit=provenance.commit(),
            versions=" ".join(f"{name}={number}" for name, number in provenance.versions().items()),
            cpu=provenance.cpu(),
            gpu=provenance.gpu(),
        )

    def describe(self, origin: Origin) -> dict[str, Any]:
        """``provenance.json`` of a sweep that starts now."""
        return {
            "command": provenance.command(),
            "started": datetime.now(UTC).isoformat(timespec="seconds"),
            "finished": None,
            "commit": origin.commit,
            "versions": provenance.versions(),
            "hardware": provenance.hardware(),
            "prompts": [{"file": path.name, "sha256": provenance.file_digest(path)} for path in self.prompts_paths],
            "sampling": asdict(self.sampling),
            "configurations": {
                c.label: {
                    "server_flags": [provenance.portable(flag) for flag in self.flags(c)],
                    "policy": c.policy_fields,
                }
                for c in self.configurations
            },
        }


def run_sweep(sweep: Sweep, output: Path, console: Console) -> list[Agreement]:
    """Measure everything and write the files of the module's docstring to ``output``.

    Returns:
        How far the texts of the configurations agree; empty unless decoding was greedy.

    Raises:
        ConfigError: options or prompts cannot work.
        LaunchError: a server did not start, failed a request or died.
    """
    prompts = load_mixed_prompts(sweep.prompts_paths)
    servers = sweep.servers()
    output.mkdir(parents=True, exist_ok=True)
    # Before the servers start: the tree may change while they run.
    origin = sweep.origin()
    record = sweep.describe(origin)
    provenance.write_json(output / "provenance.json", record)
    with (
        RowWriter(output / "sweep.csv") as rows,
        RequestLog(output / "requests.jsonl") as log,
        _progress(console) as progress,
    ):
        progress.add_task("starting servers", total=None)
        with Fleet(servers, lambda label: progress.console.print(f"starting {label}", highlight=False)) as fleet:
            for cell, row, replies in _measure_all(sweep, prompts, fleet, origin, progress):
                rows.write(row)
                log.write(cell, replies)
                progress.console.print(_line(row), highlight=False)
    greedy = sweep.sampling.temperature == 0
    served = [(c.label, c.policy, c.dtype) for c in sweep.configurations]
    agreements = compare(log.answers, choose_baselines(served)) if greedy else []
    provenance.write_json(
        output / "agreement.json", {"agreements": [{**asdict(a), "share": a.share} for a in agreements]}
    )
    record["finished"] = datetime.now(UTC).isoformat(timespec="seconds")
    provenance.write_json(output / "provenance.json", record)
    return agreements


def _measure_all(
    sweep: Sweep, prompts: Sequence[Prompt], fleet: Fleet, origin: Origin, progress: Progress
) -> Iterator[tuple[Cell, SweepRow, list[Reply]]]:
    """Measure cell by cell; the warm-up round is left out of the results."""
    cells = interleave(sweep.configurations, sweep.concurrencies, sweep.num_rounds)
    # An answer takes about as long at every concurrency, so a round is as long as its prompts per user.
    task = progress.task_ids[0]
    progress.reset(task, total=sum(_num_prompts(sweep, cell) / cell.concurrency for cell in cells))
    for cell in cells:
        kind = "warm-up" if cell.is_warm_up else f"round {cell.round}"
        progress.update(task, description=f"{kind}, {cell.concurrency} users, {cell.configuration.label}")
        chosen = round_prompts(prompts, cell.round, _num_prompts(sweep, cell))
        on_reply = partial(progress.advance, task, 1 / cell.concurrency)
        row, replies = _measure(sweep, cell, chosen, fleet, origin, on_reply)
        if not cell.is_warm_up:
            yield cell, row, replies


def _measure(
    sweep: Sweep,
    cell: Cell,
    prompts: Sequence[Prompt],
    fleet: Fleet,
    origin: Origin,
    on_reply: Callable[[], None],
) -> tuple[SweepRow, list[Reply]]:
    with fleet.awake(cell.configuration.label) as server:
        if cell.configuration.policy_fields is not None:
            server.post_json("/dspark/policy", cell.configuration.policy_fields)
        stats_before = _read_stats(server, cell.configuration)
        cpu_before = CpuTime.read(server.pid)
        replies = ask_all(server.url, prompts, cell.concurrency, sweep.sampling, on_reply)
        cpu_time = CpuTime.read(server.pid) - cpu_before
        stats_after = _read_stats(server, cell.configuration)
    stats = {name: stats_after[name] - stats_before[name] for name in stats_after} if stats_before else None
    return make_row(cell, replies, cpu_time, stats, origin), replies


def _read_stats(server: LaunchedServer, configuration: Configuration) -> dict[str, int]:
    """Counters of the server by column; empty for a server without DSPARK."""
    if configuration.is_plain:
        return {}
    report = server.get_json("/dspark/stats")
    return {column: report[key] for column, key in STAT_KEYS.items()}


def _num_prompts(sweep: Sweep, cell: Cell) -> int:
    """A warm-up round only has to see every batch size once."""
    return cell.concurrency if cell.is_warm_up else max(sweep.num_prompts, PROMPTS_PER_USER * cell.concurrency)


def _line(row: SweepRow) -> str:
    accept = f", accept length {row.accept_length:.2f}" if row.accept_length else ""
    return (
        f"round {row.round}, {row.concurrency:>3} users, {row.config}: {row.output_tok_s:.1f} tok/s, "
        f"{row.per_user_tok_s:.1f} per user{accept}"
        f"{f' (others used {row.other_cpu_share:.0%} of the CPU)' if row.other_cpu_share > 0.1 else ''}"
    )


def _progress(console: Console) -> Progress:
    columns = (BarColumn(), TextColumn("{task.description}"), TimeElapsedColumn(), TimeRemainingColumn())
    return Progress(*columns, console=console, transient=True)


def _agreement_table(agreements: Sequence[Agreement]) -> Table:
    table = Table(title="texts identical to the baseline's (a baseline: to its own at the lowest concurrency)")
    for name in ("config", "users", "baseline", "users", "identical", "first split"):
        table.add_column(name)
    for a in agreements:
        split = a.splits[0] if a.splits else None
        place = f"prompt {split.prompt_index}, character {split.at}: " if split else ""
        texts = f"{split.expected!r} | {split.found!r}" if split else ""
        identical = f"{a.identical}/{a.compared}"
        table.add_row(a.config, str(a.concurrency), a.baseline, str(a.baseline_concurrency), identical, place + texts)
    return table


def _integers(context: click.Context, parameter: click.Parameter, text: str) -> list[int]:
    numbers = [int(word) if word.strip().isdecimal() else 0 for word in text.split(",")]
    if min(numbers) < 1 or len(set(numbers)) < len(numbers):
        raise click.BadParameter(f"{text!r} is not a list of different positive numbers such as 1,2,4,8")
    return numbers


@click.command(help="Plain serving and DSPARK policies side by side, at several concurrencies, on one set of prompts.")
@click.option("--target", required=True, help="Target checkpoint.")
@click.option("--draft", help="Draft checkpoint; needed unless every configuration is plain.")
@click.option("--config", "configs", multiple=True, required=True, metavar="CONFIG", help=f"{GRAMMAR}. Repeatable.")
@click.option("--dtype", default="bfloat16", show_default=True, help="Of configurations that name none.")
@click.option("--concurrency", default="1,2,4,8", show_default=True, callback=_integers, help="Numbers of users.")
@click.option("--rounds", default=4, show_default=True, type=click.IntRange(1), help="Recorded rounds.")
@click.option(
    "--prompts",
    required=True,
    multiple=True,
    type=click.Path(path_type=Path),
    help='JSONL of {"turns": [text, ...]}; several files take turns.',
)
@click.option(
    "--num-prompts",
    default=8,
    show_default=True,
    type=click.IntRange(1),
    help=f"Prompts per round, at least; {PROMPTS_PER_USER} per user, if that is more.",
)
@click.option("--max-tokens", default=128, show_default=True, type=click.IntRange(1), help="Longest answer.")
@click.option("--temperature", default=0.0, show_default=True, type=click.FloatRange(0), help="0 is greedy.")
@click.option("--ignore-eos", is_flag=True, help="Answers of --max-tokens tokens: no tail of a few long ones.")
@click.option("--raw-prompts", is_flag=True, help="Send the text as it is, without the chat template.")
@click.option("--request-timeout", default=600.0, show_default=True, type=click.FloatRange(1), help="Seconds.")
@click.option("--device", default="cpu", show_default=True, type=click.Choice(["cpu", "cuda"]))
@click.option("--server-flags", default="", help="Further arguments of every server, as one text.")
@click.option("--output", required=True, type=click.Path(file_okay=False, path_type=Path), help="Folder for results.")
def main(**options: Any) -> None:
    """Command line; see the module."""
    # Texts and labels may look like markup.
    console = Console(width=None if sys.stdout.isatty() else 160, markup=False, emoji=False)
    # Python ends on SIGTERM without unwinding, which would leave suspended servers behind.
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    output = options["output"]
    try:
        agreements = run_sweep(_sweep(options), output, console)
        frame = read_sweep(output / "sweep.csv")
        summaries = {metric: summarise(paired_ratios(frame, metric, frame_baselines(frame))) for metric in SHOWN}
    except DSparkError as error:
        raise click.ClickException(str(error)) from error
    if agreements:
        console.print(_agreement_table(agreements))
    for metric, summary in summaries.items():
        if not summary.empty:
            console.print(ratio_table(summary, metric))
    console.print(f"Figures: python benchmarks/plot_sweep.py {output / 'sweep.csv'}", highlight=False)


def _sweep(options: dict[str, Any]) -> Sweep:
    return Sweep(
        target=options["target"],
        draft=options["draft"],
        device=options["device"],
        configurations=parse_configurations(options["configs"], options["dtype"]),
        concurrencies=options["concurrency"],
        num_rounds=options["rounds"],
        num_prompts=options["num_prompts"],
        prompts_paths=options["prompts"],
        sampling=Sampling(
            max_tokens=options["max_tokens"],
            temperature=options["temperature"],
            ignore_eos=options["ignore_eos"],
            raw=options["raw_prompts"],
            timeout_s=options["request_timeout"],
        ),
        server_flags=tuple(options["server_flags"].split()),
    )


if __name__ == "__main__":
    main()
