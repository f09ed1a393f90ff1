"""Figures of a sweep: throughput against concurrency and against the speed that one user sees, and what was verified.

    python benchmarks/plot_sweep.py RESULTS/sweep.csv

Writes ``throughput_vs_concurrency.png``, ``throughput_vs_user_speed.png`` and, where a configuration speculates,
``verification_vs_concurrency.png`` beside the file. Points are medians over
the rounds; bars reach from the slowest round to the fastest.
"""

from __future__ import annotations

import textwrap
from pathlib import Path
from typing import Any

import click
import matplotlib as mpl
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator, NullLocator, ScalarFormatter
from paired_ratio import read_sweep

from sglang_dspark.errors import DSparkError

MARKERS = "os^Dv<>PX*"
DPI = 150


def throughput_vs_concurrency(frame: pd.DataFrame) -> Figure:
    """Output tokens per second of all users over the number of users, one line per configuration."""
    figure, axes = _new_figure(frame)
    for label, style, points in _lines(frame):
        middle, low, high = (points[f"output_tok_s_{name}"] for name in ("median", "min", "max"))
        axes.errorbar(points.index, middle, yerr=[middle - low, high - middle], label=label, **style)
    _users_axis(axes, frame)
    axes.set_ylabel("output tokens per second, all users")
    return _finish(figure, axes)


def throughput_vs_user_speed(frame: pd.DataFrame) -> Figure:
    """Output tokens per second of all users over those of one user; points are annotated with the concurrency.

    Up and to the right is better: more tokens from the machine at the same speed for each user, or the reverse.
    """
    figure, axes = _new_figure(frame)
    for label, style, points in _lines(frame):
        x, y = points["per_user_tok_s_median"], points["output_tok_s_median"]
        axes.errorbar(
            x,
            y,
            xerr=[x - points["per_user_tok_s_min"], points["per_user_tok_s_max"] - x],
            yerr=[y - points["output_tok_s_min"], points["output_tok_s_max"] - y],
            label=label,
            **style,
        )
        for concurrency in points.index:
            place = (x[concurrency], y[concurrency])
            axes.annotate(str(concurrency), place, xytext=(5, 5), textcoords="offset points", fontsize=8)
    axes.set_xlim(left=0)
    axes.set_xlabel("output tokens per second, one user (numbers: concurrent users)")
    axes.set_ylabel("output tokens per second, all users")
    return _finish(figure, axes)


def verification_vs_concurrency(frame: pd.DataFrame) -> Figure:
    """Drafts verified per request and step, share of plain steps, and share of verified drafts that were in vain."""
    frame = frame[frame["policy"] != "plain"].assign(
        verify_len=lambda rows: rows["verified"] / rows["decode_rounds"],
        plain_share=lambda rows: rows["plain_steps"] / rows["steps"],
        wasted=lambda rows: 1 - rows["accepted"] / rows["verified"].where(rows["verified"] > 0),
    )
    figure = Figure(figsize=(7.5, 9), layout="constrained")
    figure.supxlabel(textwrap.fill(caption(frame), 120), fontsize=7, color="0.35")
    titles = {
        "verify_len": "drafts verified per request and step",
        "plain_share": "share of steps without drafting (parked)",
        "wasted": "wasted-verify fraction",
    }
    panels = figure.subplots(len(titles), sharex=True)
    for axes, (column, title) in zip(panels, titles.items(), strict=True):
        for label, style, _ in _lines(frame):
            points = frame[frame["config"] == label].groupby("concurrency")[column].median()
            axes.plot(points.index, points, label=label, **{k: v for k, v in style.items() if k != "capsize"})
        axes.set_ylabel(title)
        axes.set_ylim(0, None if column == "verify_len" else 1)
        axes.grid(alpha=0.3)
    _users_axis(panels[-1], frame)
    # Where there is room: hardly any step is without drafting, unless the policy is off or parked.
    panels[1].legend(frameon=False, fontsize=8, loc="center")
    return figure


def caption(frame: pd.DataFrame) -> str:
    """What was measured, where, and how many rounds."""
    first = frame.iloc[0]
    hardware = first["gpu"] if isinstance(first["gpu"], str) else first["cpu"]
    rounds = frame["round"].nunique()
    return (
        f"{first['model']} on {hardware}; prompts {first['prompt_set']}; "
        f"median and range of {rounds} round{'s' if rounds > 1 else ''}; {first['versions']}; "
        f"commit {first['commit'][:12]}"
    )


def _lines(frame: pd.DataFrame) -> list[tuple[str, dict[str, Any], pd.DataFrame]]:
    """Label, style and points ``[concurrency -> <figure>_<median|min|max>]`` of every configuration."""
    lines = []
    for position, (label, rows) in enumerate(frame.groupby("config", sort=False)):
        points = rows.groupby("concurrency")[["output_tok_s", "per_user_tok_s"]].agg(["median", "min", "max"])
        points.columns = ["_".join(pair) for pair in points.columns]
        style = {
            "color": mpl.colormaps["tab10"](position % 10),
            "marker": MARKERS[position % len(MARKERS)],
            "linestyle": "--" if (rows["policy"] == "plain").all() else "-",
            "capsize": 3,
            "linewidth": 1.5,
        }
        lines.append((str(label), style, points))
    return lines


def _new_figure(frame: pd.DataFrame) -> tuple[Figure, Axes]:
    # Without pyplot: no global state, and no display is needed.
    figure = Figure(figsize=(7.5, 5.2), layout="constrained")
    figure.supxlabel(textwrap.fill(caption(frame), 120), fontsize=7, color="0.35")
    return figure, figure.add_subplot()


def _users_axis(axes: Axes, frame: pd.DataFrame) -> None:
    axes.set_xscale("log", base=2)
    axes.xaxis.set_major_locator(FixedLocator(sorted(frame["concurrency"].unique())))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.xaxis.set_major_formatter(ScalarFormatter())
    axes.set_xlabel("concurrent users")


def _finish(figure: Figure, axes: Axes) -> Figure:
    axes.set_ylim(bottom=0)
    axes.grid(alpha=0.3)
    axes.legend(frameon=False)
    return figure


@click.command(help="Figures of a sweep: throughput against concurrency, and against the speed that one user sees.")
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
    figures = [throughput_vs_concurrency, throughput_vs_user_speed]
    if (frame["policy"] != "plain").any():
        figures.append(verification_vs_concurrency)
    for draw in figures:
        path = folder / f"{draw.__name__}.png"
        draw(frame).savefig(path, dpi=DPI)
        click.echo(path)


if __name__ == "__main__":
    main()
