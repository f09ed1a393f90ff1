"""Ratios of each configuration of a sweep to its baseline, paired by load and round.

    python benchmarks/paired_ratio.py RESULTS/sweep.csv
    python benchmarks/paired_ratio.py RESULTS/sweep.csv --metric per_user_tok_s --of auto@bfloat16

A machine that other people use drifts by tens of percent within minutes, so means of two configurations say little.
The two rounds of a pair ran right after one another, on equal prompts: their ratio keeps the effect and drops the
drift. Shown are the geometric mean of the ratios, its interval (Student's t on their logarithms, which on normal noise
holds the true ratio in 95 % of cases for any number of rounds) or, of few rounds, their range, and in how many rounds
the ratio was above 1. Include the same configuration under a second name to see what noise alone does.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import click
import numpy as np
import pandas as pd
from rich.console import Console
from rich.table import Table
from scipy.stats import t
from serving.configurations import choose_baselines
from serving.results import read_sweep

from sglang_dspark.errors import ConfigError, DSparkError

CONFIDENCE = 0.95
MIN_ROUNDS = 4
"""Rounds below which no interval is given: with two, it would reach to 13 times their spread."""


def frame_baselines(frame: pd.DataFrame) -> dict[str, str]:
    """Return the label of the configuration that the speed of each one of a sweep is divided by."""
    served = frame[["config", "policy", "dtype"]].drop_duplicates()
    return choose_baselines(list(served.itertuples(index=False, name=None)))


def paired_ratios(frame: pd.DataFrame, metric: str, baselines: dict[str, str]) -> pd.DataFrame:
    """Return one row per configuration other than a baseline, load and round.

    Rounds in which one of the two has no value are left out (a sweep that was cut short).

    Returns:
        Columns ``config, baseline, load, round, ratio``, and ``batch`` where the rows say which texts a round had.

    Raises:
        ConfigError: the sweep has no such figure, or it is not above 0 everywhere (goodput may be 0), so that geometric
            means of its ratios mean nothing.
    """
    if metric not in (numbers := frame.select_dtypes("number").columns):
        raise ConfigError(f"--metric {metric!r} is not a figure of the sweep; use one of {', '.join(numbers)}")
    texts = ["batch"] if "batch" in frame else []
    cells = frame[["config", "load", "round", *texts, metric]].assign(baseline=frame["config"].map(baselines))
    references = cells.rename(columns={"config": "of", metric: "reference"}).drop(columns=["baseline", *texts])
    pairs = cells[cells["config"] != cells["baseline"]].merge(
        references, left_on=["baseline", "load", "round"], right_on=["of", "load", "round"]
    )
    if (pairs[[metric, "reference"]] <= 0).any(axis=None):
        raise ConfigError(
            f"--metric {metric} is 0 or less in some rounds; ratios to nothing mean nothing, see the table"
        )
    pairs["ratio"] = pairs[metric] / pairs["reference"]
    return pairs.dropna(subset=["ratio"])[["config", "baseline", "load", "round", *texts, "ratio"]]


def ratios_to_each(frame: pd.DataFrame, metric: str, label: str) -> pd.DataFrame:
    """Return the ratios of one configuration to each of the others.

    The one to the best of them is among these, whichever that is. So it is no worse than the lowest, and its interval
    reaches no lower than the lowest one, without anybody having to pick the best by the same noisy rounds.

    Returns:
        As :func:`paired_ratios`, with each of the others as a baseline.

    Raises:
        ConfigError: the sweep has no such configuration, or no other.
    """
    others = [other for other in frame["config"].unique() if other != label]
    if not others or len(others) == frame["config"].nunique():
        raise ConfigError(
            f"--of {label!r} needs that and another one in the sweep, found {', '.join(frame['config'].unique())}"
        )
    pairs = [
        paired_ratios(cells[cells["config"].isin([label, other])], metric, {label: other, other: other})
        for _, cells in frame.groupby("load", sort=False)
        for other in others
    ]
    return pd.concat(pairs)


def summarise(pairs: pd.DataFrame) -> pd.DataFrame:
    """Return the geometric mean and spread of the ratios of every configuration and load.

    Returns:
        Columns ``config, baseline, load, rounds, ratio, low, high, smallest, largest, above``. ``low`` and ``high``
        bound the t interval of the mean and are NaN below :data:`MIN_ROUNDS` rounds; ``above`` counts rounds with a
        ratio above 1.
    """
    records = []
    # Configurations in the order of the first load everywhere, although they ran in another one at each.
    for column in ("load", "config", "baseline"):
        pairs = pairs.assign(**{column: pd.Categorical(pairs[column], pairs[column].unique())})
    for (load, config, baseline), group in pairs.groupby(["load", "config", "baseline"], observed=True):
        ratios = group["ratio"].to_numpy()
        logs = np.log(ratios)
        low, high = _interval(logs)
        record = {"config": config, "baseline": baseline, "load": load, "rounds": len(ratios)}
        record |= {"ratio": float(np.exp(logs.mean())), "low": low, "high": high, "smallest": ratios.min()}
        records.append(record | {"largest": ratios.max(), "above": int((ratios > 1).sum())})
    return pd.DataFrame(records)


def spread_of(ratios: Sequence[float]) -> dict[str, float | None]:
    """Return the geometric mean of rounds' ratios, with its interval (None of few) and their range, as JSON."""
    [row] = summarise(pd.DataFrame({"config": "", "baseline": "", "load": "", "ratio": ratios})).to_dict("records")
    names = ("rounds", "ratio", "low", "high", "smallest", "largest")
    return {name: None if np.isnan(row[name]) else round(float(row[name]), 3) for name in names}


def interval_text(row: Any) -> str:
    """Return the interval of a row of :func:`summarise`, or the range of its rounds if there is none."""
    low, high = (row.smallest, row.largest) if np.isnan(row.low) else (row.low, row.high)
    return f"{low:.2f} to {high:.2f}"


def ratio_text(row: Any) -> str:
    """Return the ratio of a row of :func:`summarise`, and :func:`interval_text` in brackets."""
    return f"{row.ratio:.2f} ({interval_text(row)})"


def ratio_table(summary: pd.DataFrame, metric: str) -> Table:
    """Return ``summary`` as a table for the terminal."""
    table = Table(title=f"{metric}: ratio to the baseline in the same row, paired by round")
    for name in ("config", "baseline", "load", "rounds", "ratio (interval)", "above 1"):
        table.add_column(name, justify="left" if name in ("config", "baseline") else "right")
    for row in summary.itertuples():
        above = f"{row.above}/{row.rounds}"
        table.add_row(row.config, row.baseline, row.load, str(row.rounds), ratio_text(row), above)
    return table


def _interval(logs: np.ndarray) -> tuple[float, float]:
    """Return the interval of the geometric mean: Student's t on the logarithms of the ratios."""
    if len(logs) < MIN_ROUNDS:
        return float("nan"), float("nan")
    margin = t.ppf((1 + CONFIDENCE) / 2, len(logs) - 1) * logs.std(ddof=1) / np.sqrt(len(logs))
    return float(np.exp(logs.mean() - margin)), float(np.exp(logs.mean() + margin))


@click.command(help="Print the ratios of each configuration of a sweep to its baseline, paired by load and round.")
@click.argument("sweep", type=click.Path(exists=True, dir_okay=False, path_type=Path))
@click.option("--metric", default="output_tok_s", show_default=True, help="A numeric column of the sweep.")
@click.option("--of", "label", help="Label to compare with each of the others. Default: with off, or off with plain.")
def main(sweep: Path, metric: str, label: str | None) -> None:
    """Run the command line; see the module."""
    try:
        frame = read_sweep(sweep)
        baselines = frame_baselines(frame)
        pairs = ratios_to_each(frame, metric, label) if label else paired_ratios(frame, metric, baselines)
        if pairs.empty:
            raise ConfigError(f"{sweep} holds no pair: every configuration is a baseline; add one or pass --of")
    except DSparkError as error:
        raise click.ClickException(str(error)) from error
    Console(width=None if sys.stdout.isatty() else 160, markup=False, emoji=False).print(
        ratio_table(summarise(pairs), metric)
    )


if __name__ == "__main__":
    main()
