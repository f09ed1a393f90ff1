"""Figures of a sweep, as PNG files.

    python benchmarks/plot_sweep.py RESULTS/sweep.csv

Draws what the file has data for: throughput against users (with the ratio to plain serving and where it crosses 1) and
against the speed that one user sees (with the Pareto frontier), verification against users, wasted drafts against load,
latencies against the rate of arrivals, and goodput. Points are medians over the rounds; bars reach from the slowest
round to the fastest. report.py puts the same figures on a page that says how to read them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import click
import matplotlib as mpl
import pandas as pd
from figures.latency import goodput_vs_load, latency_vs_rate
from figures.style import DPI, LIGHT
from figures.throughput import throughput_vs_concurrency, throughput_vs_user_speed
from figures.verification import verification_vs_concurrency, waste_vs_load
from matplotlib.figure import Figure
from serving.results import read_sweep

from sglang_dspark.errors import DSparkError

Drawing = Callable[[pd.DataFrame], Figure]

NEEDS: dict[Drawing, str] = {
    throughput_vs_concurrency: "concurrency",
    throughput_vs_user_speed: "concurrency",
    verification_vs_concurrency: "mean_verify_len",
    waste_vs_load: "wasted_share",
    latency_vs_rate: "rate",
    goodput_vs_load: "sla_met_share",
}
"""Figure -> the column without which there is nothing to draw, in the order in which they are read."""


def drawings(frame: pd.DataFrame) -> Iterator[Drawing]:
    """The figures that the rows of a sweep have data for."""
    for draw, column in NEEDS.items():
        rows = frame[frame["concurrency"].notna()] if draw is verification_vs_concurrency else frame
        if column in rows and rows[column].notna().any():
            yield draw


@click.command(help="Figures of a sweep, as PNG files.")
@click.argument("sweep", type=click.Path(exists=True, dir_okay=False, path_type=Path))
@click.option(
    "--output",
    type=click.Path(file_okay=False, path_type=Path),
    help="Folder for the figures. Default: that of the sweep.",
)
def main(sweep: Path, output: Path | None) -> None:
    """Command line; see the module."""
    try:
        frame = read_sweep(sweep)
    except DSparkError as error:
        raise click.ClickException(str(error)) from error
    folder = output or sweep.parent
    folder.mkdir(parents=True, exist_ok=True)
    with mpl.rc_context(LIGHT):
        for draw in drawings(frame):
            path = folder / f"{draw.__name__}.png"
            draw(frame).savefig(path, dpi=DPI)
            click.echo(path)


if __name__ == "__main__":
    main()
