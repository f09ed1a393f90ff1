"""Write a page about a sweep: its tables, and where the numbers come from.

    python benchmarks/report.py RESULTS

Reads ``sweep.csv`` and ``provenance.json``. Writes ``report.md`` next to them, and a figure of the throughput.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import click
import pandas as pd
from matplotlib.figure import Figure
from matplotlib.ticker import ScalarFormatter
from paired_ratio import MIN_ROUNDS, frame_baselines, interval_text, paired_ratios, summarise
from serving.configurations import OFF, PLAIN, SIMULATED
from serving.results import config_name, over_rounds, read_sweep

from sglang_dspark.config import POLICY_NAMES
from sglang_dspark.errors import ConfigError, DSparkError

FIGURE = "throughput_vs_concurrency.png"
STEP_TIMES = (
    "Step-time results: weights are random and drafts were kept at random, the same ones by every worker. Times and "
    "loads are those of the shape; texts mean nothing."
)
NO_OFF = "`off` was not measured, so speculation and the plugin's own step cannot be told apart."
LATENCY = (
    "Milliseconds, median of the rounds. TTFT: time to first token. TPOT: time per further token. ITL: time between "
    "two arrivals of text; under speculation one arrival brings several tokens, so ITL is longer than TPOT."
)
SPECULATION = (
    "Counts of all rounds together. Accept length counts the target's own token. Wasted: share of verified drafts that "
    "were rejected. Not drafted: share of steps in which nothing was, as on a parked server."
)
TIMES = {"TTFT mean": "ttft_ms", "TTFT p95": "ttft_p95_ms", "TPOT mean": "tpot_ms", "TPOT p95": "tpot_p95_ms"}
TIMES |= {f"ITL p{share}": f"itl_p{share}_ms" for share in (50, 95, 99)}
COUNTS = {"accept length": "accept_length", "verify length": "mean_verify_len", "wasted": "wasted_share"}
COUNTS |= {"not drafted": "plain_share"}


def render(folder: Path) -> str:
    """Return the page about the sweep in ``folder``, and write its figure.

    Raises:
        ConfigError: there is no sweep, or it has no rows.
    """
    path = folder / "sweep.csv"
    if not path.exists():
        raise ConfigError(f"{folder} has no sweep.csv; pass the --output folder of benchmarks/sweep_concurrency.py")
    frame = read_sweep(path)
    record = json.loads((folder / "provenance.json").read_text(encoding="utf-8"))
    policies = set(frame["policy"])
    parts = [f"# {record['target']}: {frame['config'].nunique()} configurations, {frame['load'].nunique()} loads"]
    if SIMULATED in record["command"]:
        parts.append(STEP_TIMES)
    if PLAIN in policies and OFF not in policies and policies & set(POLICY_NAMES):
        parts.append(NO_OFF)
    draw(frame).savefig(folder / FIGURE, dpi=150)
    parts.append(f"![throughput against users]({FIGURE})")
    parts += [_speeds(frame), _columns("Latency", frame, LATENCY, TIMES)]
    parts.append(_columns("Speculation", frame[frame["accept_length"].notna()], SPECULATION, COUNTS))
    parts.append("## Where the numbers come from")
    parts.append(markdown_table(("what", "value"), facts(frame, record)))
    return "\n\n".join(part for part in parts if part) + "\n"


def draw(frame: pd.DataFrame) -> Figure:
    """Draw the speed of all users over their number: medians, and bars from the slowest round to the fastest."""
    figure = Figure(figsize=(8, 5), layout="constrained")  # not by pyplot, which may want a display
    axes = figure.subplots()
    speeds = frame.groupby(["config", "concurrency"], sort=False)["output_tok_s"].agg(["median", "min", "max"])
    for label, rows in speeds.groupby(level="config"):
        middle, low, high = (rows[name].to_numpy() for name in rows)
        name, users = config_name(frame, str(label)), rows.index.get_level_values("concurrency")
        style = {"linestyle": "--" if name in (PLAIN, OFF) else "-", "linewidth": 3 if name == "auto" else 1.5}
        axes.errorbar(users, middle, yerr=[middle - low, high - middle], label=name, marker="o", capsize=2, **style)
    axes.set_xscale("log", base=2)
    axes.set_xticks(sorted(frame["concurrency"].unique()))
    axes.xaxis.set_major_formatter(ScalarFormatter())
    axes.set(xlabel="users at the same time", ylabel="output tokens per second, all users together", ylim=(0, None))
    axes.grid(alpha=0.2)
    axes.legend(frameon=False)
    return figure


def prompt_names(record: Mapping[str, Any]) -> str:
    """Return the names of the prompt files of a sweep."""
    return ", ".join(Path(prompts["file"]).stem for prompts in record["prompts"])


def _speeds(frame: pd.DataFrame) -> str:
    baselines = frame_baselines(frame)
    told = summarise(paired_ratios(frame, "output_tok_s", baselines))
    ratios = {(row.config, row.load): row for row in told.itertuples()}
    rows = []
    for load, config, cells in _by_load(frame):
        figures = ("output_tok_s", "decode_tok_s", "per_user_tok_s", "per_user_tok_s_p5")
        row = [load, config_name(frame, config), *(figure_text(cells, column) for column in figures)]
        if ratio := ratios.get((config, load)):
            row += [f"{ratio.ratio:.2f}", config_name(frame, baselines[config]), interval_text(ratio)]
        else:
            row += ["-", "", ""]
        rows.append(row)
    spread = "95 % interval of the mean" if frame["round"].nunique() >= MIN_ROUNDS else "range of the rounds"
    note = (
        "Tokens per second, median of the rounds; while all users decode, no prompt is encoded. Ratios (all users) are "
        "geometric means of those of the rounds: what speculates to off, the same server without drafts, and off to "
        "plain serving."
    )
    header = (
        "load",
        "configuration",
        "all users",
        "while all decode",
        "one user",
        "slowest 5 %",
        "ratio",
        "to",
        spread,
    )
    return _section("Speed", note, header, rows)


def _columns(title: str, frame: pd.DataFrame, note: str, columns: Mapping[str, str]) -> str:
    """Return a table of columns of the sweep, by heading."""
    rows = [
        [load, config_name(frame, config), *(figure_text(cells, column) for column in columns.values())]
        for load, config, cells in _by_load(frame)
    ]
    return _section(title, note, ("load", "configuration", *columns), rows)


def facts(frame: pd.DataFrame, record: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Return where the numbers come from, as name and value."""
    pairs = {
        "target": record["target"],
        "drafter": record["draft"],
        "hardware": ", ".join(filter(None, (record["hardware"]["gpu"], record["hardware"]["cpu"]))),
        "prompts": prompt_names(record),
        "requests": ", ".join(f"{key} {value}" for key, value in record["sampling"].items()),
        "versions": " ".join(f"{name}={number}" for name, number in record["versions"].items()),
        "commit": record["commit"],
        "measured": f"{frame['timestamp'].min()} to {frame['timestamp'].max()}",
        "command": record["command"],
    }
    return [(name, value) for name, value in pairs.items() if value]


def _by_load(frame: pd.DataFrame) -> Iterator[tuple[str, str, pd.DataFrame]]:
    """Yield load, configuration and rows, with the configurations in the same order at every load."""
    order = list(frame["config"].unique())
    for load, rows in frame.groupby("load", sort=False):
        parts = dict(iter(rows.groupby("config")))
        yield from ((str(load), label, parts[label]) for label in order if label in parts)


def figure_text(cells: pd.DataFrame, column: str) -> str:
    """Return one figure for several rounds of a configuration at a load, with three digits."""
    value = over_rounds(cells, column)
    if pd.isna(value):
        return "-"
    if column.endswith("_share"):
        return f"{value:.0%}"
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:#.3g}"


def markdown_table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return a table in Markdown."""
    lines = ["|" + "---|" * len(header), *(f"| {' | '.join(row)} |" for row in rows)]
    return "\n".join([f"| {' | '.join(header)} |", *lines])


def _section(title: str, note: str, header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return a table with its title and how to read it; nothing without rows."""
    return f"## {title}\n\n{note}\n\n{markdown_table(header, rows)}" if rows else ""


@click.command(help="Write a page about a sweep: its tables, and where the numbers come from.")
@click.argument("results", type=click.Path(exists=True, file_okay=False, path_type=Path))
def main(results: Path) -> None:
    """Run the command line; see the module."""
    path = results / "report.md"
    try:
        path.write_text(render(results), encoding="utf-8")
    except DSparkError as error:
        raise click.ClickException(str(error)) from error
    click.echo(path)


if __name__ == "__main__":
    main()
