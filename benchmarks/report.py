"""Write a page about a sweep: its tables, and where the numbers come from.

    python benchmarks/report.py RESULTS

Reads ``sweep.csv``, and ``provenance.json`` and ``agreement.json`` if they exist. Writes ``report.md`` beside them, and
the figure of plot_sweep.py if users waited for their answers.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click
import pandas as pd
import plot_sweep
from paired_ratio import MIN_ROUNDS, frame_baselines, interval_text, paired_ratios, summarise
from serving.configurations import OFF, PLAIN
from serving.results import config_name, over_rounds, read_sweep
from tabled.layout import markdown_table

from sglang_dspark.config import POLICY_NAMES
from sglang_dspark.errors import ConfigError, DSparkError


@dataclass(frozen=True)
class TableOf:
    """A table of the page: header cells, rows of texts, and a sentence on how to read it."""

    title: str
    note: str
    header: list[str]
    rows: list[list[str]]


def render(folder: Path) -> str:
    """Return the page about the sweep in ``folder``.

    Raises:
        ConfigError: there is no sweep, or it has no rows.
    """
    path = folder / "sweep.csv"
    if not path.exists():
        raise ConfigError(f"{folder} has no sweep.csv; pass the --output folder of benchmarks/sweep_concurrency.py")
    frame = read_sweep(path)
    provenance, agreement = (_read_json(folder / file) for file in ("provenance.json", "agreement.json"))
    if simulated := "simulate-acceptance" in provenance.get("command", ""):
        agreement = {}  # texts of random weights have nothing to agree on
    parts = [
        f"# {frame['model'].iloc[0]}: {frame['config'].nunique()} configurations, {frame['load'].nunique()} loads",
        *remarks(frame, simulated=simulated),
    ]
    if frame["concurrency"].notna().any():
        parts.append(f"![throughput against users]({plot_sweep.write(frame, folder).name})")
    for table in tables(frame, agreement):
        parts += [f"## {table.title}", table.note, markdown_table(table.header, table.rows)]
    parts += ["## Where the numbers come from", markdown_table(("what", "value"), facts(frame, provenance))]
    if frame.attrs["absent"]:
        parts.append(
            "This sweep was measured before these columns existed, so they are missing or derived from its counts: "
            f"{', '.join(frame.attrs['absent'])}."
        )
    return "\n\n".join(part for part in parts if part) + "\n"


STEP_TIMES = (
    "Step-time results: weights are random and drafts were kept by chance, with given probabilities. Times and loads "
    "are those of the shape; texts mean nothing, and the drafter does not know which of its drafts are good."
)


NO_OFF = "`off` was not measured, so speculation and the plugin's own step cannot be told apart."


def remarks(frame: pd.DataFrame, *, simulated: bool) -> list[str]:
    """Return the notes that a reader needs before the tables."""
    policies = set(frame["policy"])
    mixed = PLAIN in policies and OFF not in policies and policies & set(POLICY_NAMES)
    return [*([STEP_TIMES] if simulated else []), *([NO_OFF] if mixed else [])]


def tables(frame: pd.DataFrame, agreement: dict[str, Any]) -> list[TableOf]:
    """Return the tables of the page; one without data is left out."""
    found = [
        _speed_table(frame),
        _latency_table(frame),
        _speculation_table(frame),
        _goodput_table(frame),
        _agreement_table(agreement),
    ]
    return [table for table in found if table.rows]


def facts(frame: pd.DataFrame, provenance: dict[str, Any]) -> list[tuple[str, str]]:
    """Return where the numbers come from, as name and value."""
    first = frame.iloc[0]
    sampling = provenance.get("sampling", {})
    asked = ", ".join(f"{key} {value}" for key, value in sampling.items())
    drafts = ", ".join(draft for draft in frame["draft"].dropna().unique() if draft)
    pairs = [
        ("target", first["model"]),
        ("drafter", drafts),
        ("hardware", ", ".join(text for text in (first["gpu"], first["cpu"]) if isinstance(text, str))),
        ("prompts", first["prompt_set"]),
        ("requests", asked),
        ("versions", first["versions"]),
        ("commit", ", ".join(str(commit) for commit in frame["commit"].unique())),
        ("measured", f"{frame['timestamp'].min()} to {frame['timestamp'].max()}"),
        ("command", provenance.get("command", "")),
    ]
    return [(key, str(value)) for key, value in pairs if value]


def _speed_table(frame: pd.DataFrame) -> TableOf:
    baselines = frame_baselines(frame)
    pairs = paired_ratios(frame, "output_tok_s", baselines)
    ratios = summarise(pairs).set_index(["config", "load"]) if not pairs.empty else pd.DataFrame()
    rows = []
    for load, config, cells in _by_load(frame):
        row = [load, config_name(frame, config), _figure(cells, "output_tok_s"), _figure(cells, "per_user_tok_s")]
        row.append(_figure(cells, "per_user_tok_s_p5"))
        if (config, load) in ratios.index:
            ratio = ratios.loc[(config, load)]
            row += [f"{ratio['ratio']:.2f}", config_name(frame, baselines[config]), interval_text(ratio)]
        else:
            row += ["-", "", ""]
        rows.append(row)
    spread = "95 % interval of the mean" if frame["round"].nunique() >= MIN_ROUNDS else "range of the rounds"
    note = (
        "Tokens per second, median of the rounds. Ratios are geometric means of those of the rounds: what speculates to"
        " off, the same server without drafts, and off to plain serving."
    )
    header = ["load", "configuration", "all users", "one user", "slowest 5 %", "ratio", "to", spread]
    return TableOf("Speed", note, header, rows)


def _latency_table(frame: pd.DataFrame) -> TableOf:
    columns = {"TTFT mean": "ttft_ms", "TTFT p95": "ttft_p95_ms", "TPOT mean": "tpot_ms", "TPOT p95": "tpot_p95_ms"}
    columns |= {f"ITL p{share}": f"itl_p{share}_ms" for share in (50, 95, 99)}
    note = (
        "Milliseconds, median of the rounds. TTFT: time to first token. TPOT: time per further token. ITL: time between"
        " two arrivals of text; under speculation one arrival brings several tokens, so ITL is longer than TPOT."
    )
    return _columns_table("Latency", note, frame, columns)


def _speculation_table(frame: pd.DataFrame) -> TableOf:
    speculative = frame[frame["accept_length"].notna() | frame["decode_rounds"].notna()]
    columns = {"accept length": "accept_length", "verify length": "mean_verify_len", "wasted": "wasted_share"}
    note = (
        "Counts of all rounds together. Accept length counts the target's own token. Wasted: share of verified drafts"
        " that were rejected. Not drafted: share of steps in which nothing was, as on a parked server."
    )
    return _columns_table("Speculation", note, speculative, columns | {"not drafted": "plain_share"})


def _goodput_table(frame: pd.DataFrame) -> TableOf:
    kept = frame[frame["sla_met_share"].notna()] if "sla_met_share" in frame else frame.iloc[:0]
    columns = {"share kept": "sla_met_share", "requests/s": "goodput_req_s", "tokens/s": "goodput_tok_s"}
    note = f"What was delivered with {promise(kept)}." if len(kept) else ""
    return _columns_table("Goodput", note, kept, columns)


def _columns_table(title: str, note: str, frame: pd.DataFrame, columns: dict[str, str]) -> TableOf:
    """Return a table of columns of the sweep, by heading."""
    rows = [
        [load, config_name(frame, config), *(_figure(cells, column) for column in columns.values())]
        for load, config, cells in _by_load(frame)
    ]
    return TableOf(title, note, ["load", "configuration", *columns], rows)


def _agreement_table(agreement: dict[str, Any]) -> TableOf:
    columns = ("config", "load", "baseline", "baseline_load")
    rows = [
        [*(entry[column] for column in columns), f"{entry['identical']} of {entry['compared']}"]
        for entry in agreement.get("agreements", [])
    ]
    note = (
        "Greedy texts that are identical to the baseline's. In float32 all have to be; in 16 bits the shape of a batch"
        " alone moves near-ties, so compare with how often the baseline agrees with itself at another load."
    )
    return TableOf("Texts", note, ["configuration", "load", "compared with", "load", "identical"], rows)


def _by_load(frame: pd.DataFrame) -> Iterator[tuple[str, str, pd.DataFrame]]:
    """Yield load, configuration and rows, with the configurations in the same order at every load."""
    order = list(frame["config"].unique())
    for load, rows in frame.groupby("load", sort=False):
        parts = dict(iter(rows.groupby("config")))
        yield from ((str(load), label, parts[label]) for label in order if label in parts)


def _figure(cells: pd.DataFrame, column: str) -> str:
    value = over_rounds(cells, column)
    if pd.isna(value):
        return "-"
    if column.endswith("_share"):
        return f"{value:.0%}"
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"


def promise(frame: pd.DataFrame) -> str:
    """Return the limits of goodput in words."""
    parts = []
    for column, what in (("sla_ttft_ms", "first token within"), ("sla_tpot_ms", "each further one within")):
        limits = ", ".join(f"{limit:g}" for limit in frame[column].dropna().unique())
        if limits:
            parts.append(f"{what} {limits} ms")
    return " and ".join(parts)


def _read_json(path: Path) -> dict[str, Any]:
    return json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}


@click.command(help="Write a page about a sweep: its tables, and where the numbers come from.")
@click.argument("results", type=click.Path(exists=True, file_okay=False, path_type=Path))
def main(results: Path) -> None:
    """Command line; see the module."""
    path = results / "report.md"
    try:
        path.write_text(render(results), encoding="utf-8")
    except DSparkError as error:
        raise click.ClickException(str(error)) from error
    click.echo(path)


if __name__ == "__main__":
    main()
