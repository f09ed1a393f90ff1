"""Draw the throughput of a sweep over the number of users, as a PNG file beside it.

    python benchmarks/plot_sweep.py RESULTS/sweep.csv

The upper panel shows tokens per second of all users. The panels below show the two ratios, each to its own baseline,
and mark where a line falls behind it. Points are medians over the rounds, and bars reach from the slowest round to the
fastest. report.py writes all other figures of a sweep as tables.
"""

from __future__ import annotations

import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click
import matplotlib as mpl
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator, NullLocator, ScalarFormatter
from paired_ratio import frame_baselines
from serving.configurations import OFF, PLAIN
from serving.crossovers import Crossover, crossovers, shown_baselines, user_ratios
from serving.results import config_name, read_sweep

from sglang_dspark.config import POLICY_NAMES
from sglang_dspark.errors import DSparkError

FILE = "throughput_vs_concurrency.png"
DPI = 150
WIDTH = 8.0
INK = "#1c2127"
LOOK = {
    "font.size": 10,
    "axes.titlesize": 12,
    "axes.titleweight": "bold",
    "axes.titlelocation": "left",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "text.color": INK,
}

AUTO, OTHERS = "#2f7de1", ("#7b52ab", "#a8527a", "#6b7f2a", "#8a6d3b")
SAME = {"early-stop": "#0f9d8a", "threshold": "#3aa357"}
FIXED = "YlOrRd"
"""Fixed verify lengths go from light to dark along this map: they are one family."""
FIXED_RANGE = (0.4, 1.0)
"""The part of the map that shows on a white ground."""


def draw(frame: pd.DataFrame) -> Figure:
    """Draw output tokens per second of all users over their number, and the two ratios: never one that mixes them."""
    frame = frame[frame["concurrency"].notna()]
    ratios = user_ratios(frame, frame_baselines(frame))
    baselines = shown_baselines(ratios)
    # Without pyplot: no global state, and no display is needed.
    figure = Figure(figsize=(WIDTH, 5.0 + 3.4 * len(baselines)), layout="constrained")
    figure.supxlabel(textwrap.fill(caption(frame), 125), fontsize=7, alpha=0.7)
    panels = list(figure.subplots(1 + len(baselines), squeeze=False, sharex=True)[:, 0])
    for label, style, rows in _per_config(frame):
        points = rows.groupby("concurrency")["output_tok_s"].agg(["median", "min", "max"]).dropna().astype(float)
        x, middle = points.index.to_numpy(float) * _dodge(frame, label), points["median"]
        bars = [middle - points["min"], points["max"] - middle]
        panels[0].errorbar(x, middle, yerr=bars, label=config_name(frame, label), elinewidth=0.8, capsize=2, **style)
    panels[0].set_title("Output tokens per second, all users together")
    panels[0].set_ylim(bottom=0)
    panels[0].legend(frameon=False)
    for axes, against in zip(panels[1:], baselines, strict=True):
        _draw_ratios(axes, frame, ratios[ratios["against"] == against], against)
    for axes in panels:
        axes.grid(alpha=0.2)
    _users_axis(panels[-1], frame)
    return figure


def ratio_title(ratios: pd.DataFrame, against: str) -> str:
    """Return the title of a panel of ratios to one baseline."""
    if against == OFF:
        return 'Speculation: times "off"'
    policies = set(ratios["policy"])
    if policies & (set(POLICY_NAMES) - {OFF}):
        return "Times plain SGLang (the plugin's own step and speculation in one)"
    return "Without drafts: times plain SGLang" if policies <= {OFF, PLAIN} else "Times plain SGLang"


def crossover_text(frame: pd.DataFrame, found: list[Crossover], against: str) -> str:
    """Say where the baseline, named by its policy, overtakes what speculates; empty if nothing speculates."""
    crossed = [f"{config_name(frame, c.config)} beyond about {c.users:.2g} users" for c in found if c.users is not None]
    behind = [config_name(frame, c.config) for c in found if c.users is None and c.ratio_at_most < 1]
    parts = []
    if crossed:
        parts.append(f"✖ {against} overtakes {', '.join(crossed)} (interpolated)")
    if behind:
        parts.append(f"behind {against} from the start: {', '.join(behind)}")
    if found and not parts:
        parts.append(f"No crossover: all are ahead of {against} at {int(frame['concurrency'].max())} users")
    return "; ".join(parts)


def caption(frame: pd.DataFrame) -> str:
    """Say what was measured, on what machine, and in how many rounds."""
    first = frame.iloc[0]
    hardware = first["gpu"] if isinstance(first["gpu"], str) else first["cpu"]
    rounds = frame["round"].nunique()
    dtype = f", {first['dtype']}" if frame["dtype"].nunique() == 1 else ""
    commits = ", ".join(str(commit)[:12] for commit in frame["commit"].unique())
    return (
        f"{first['model']}{dtype} on {hardware}; prompts {first['prompt_set']}; "
        f"points: median of {rounds} round{'s' if rounds > 1 else ''}, bars: slowest to fastest round; "
        f"{first['versions']}; commit {commits}"
    )


def styles(frame: pd.DataFrame) -> dict[str, dict[str, Any]]:
    """Return colour, marker and line of every configuration: plain grey and dashed, ``auto`` blue and strong."""
    served = frame.drop_duplicates("config")
    lengths = sorted(served.loc[served["policy"] == "static", "verify_len"].dropna().unique())
    low, high = FIXED_RANGE
    others, found = iter(OTHERS * len(served)), {}
    for label, policy, length in served[["config", "policy", "verify_len"]].itertuples(index=False):
        style = {"linewidth": 1.4, "marker": "o", "markersize": 4.5, "linestyle": "-", "zorder": 3}
        if policy in ("plain", "off"):
            dashes = "--" if policy == "plain" else ":"
            style |= {"color": INK, "linestyle": dashes, "linewidth": 2.2, "zorder": 4}
        elif policy == "auto":
            style |= {"color": AUTO, "linewidth": 3, "markersize": 6, "zorder": 5}
        elif policy == "static" and length in lengths:
            place = lengths.index(length) / (len(lengths) - 1) if len(lengths) > 1 else 0.5
            style |= {"color": mpl.colormaps[FIXED](low + (high - low) * place)}
        else:
            style |= {"color": SAME.get(policy) or next(others)}
        found[str(label)] = style
    return found


def _draw_ratios(axes: Axes, frame: pd.DataFrame, ratios: pd.DataFrame, against: str) -> None:
    style = styles(frame)
    for label, points in ratios.groupby("config", sort=False):
        x, middle = points["concurrency"].to_numpy(float) * _dodge(frame, str(label)), points["ratio"]
        bars = [middle - points["low"], points["high"] - middle]
        axes.errorbar(
            x, middle, yerr=bars, label=config_name(frame, str(label)), elinewidth=0.8, capsize=2, **style[str(label)]
        )
    neutral = axes.yaxis.label.get_color()
    axes.axhline(1, color=neutral, linestyle="--", linewidth=1.6)
    low, high = axes.get_ylim()
    axes.set_ylim(min(low, 0.85), max(high, 1.15))
    axes.axhspan(axes.get_ylim()[0], 1, color=neutral, alpha=0.07, zorder=0)
    axes.set_title(f"{ratio_title(ratios, against)}, paired by round (shaded: slower)")
    axes.yaxis.set_major_formatter(ScalarFormatter())
    found = crossovers(ratios)
    for crossover in found:
        if crossover.users is not None:
            axes.plot(crossover.users, 1, marker="X", markersize=11, color=style[crossover.config]["color"], zorder=6)
    text = crossover_text(frame, found, against)
    if text:
        axes.annotate(textwrap.fill(text, 90), (0.015, 0.03), xycoords="axes fraction", fontsize=8, va="bottom")


def _per_config(frame: pd.DataFrame) -> Iterator[tuple[str, dict[str, Any], pd.DataFrame]]:
    style = styles(frame)
    for label, rows in frame.groupby("config", sort=False):
        yield str(label), style[str(label)], rows


def _users_axis(axes: Axes, frame: pd.DataFrame) -> None:
    """Give the axis a tick at every measured number of users, evenly spaced by doubling, and room for single points."""
    axes.set_xscale("log", base=2)
    axes.xaxis.set_major_locator(FixedLocator(sorted(frame["concurrency"].astype(float).unique())))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.xaxis.set_major_formatter(ScalarFormatter())
    axes.margins(x=0.03)
    axes.set_xlabel("users at the same time")


def _dodge(frame: pd.DataFrame, label: str) -> float:
    """Return the factor on the number of users that keeps the bars of several configurations apart."""
    labels = list(frame["config"].unique())
    return float(2 ** (0.025 * (labels.index(label) - (len(labels) - 1) / 2)))


def write(frame: pd.DataFrame, folder: Path) -> Path:
    """Write the figure into ``folder`` and return its path."""
    path = folder / FILE
    with mpl.rc_context(LOOK):
        draw(frame).savefig(path, dpi=DPI)
    return path


@click.command(help="Draw the throughput of a sweep over the number of users, as a PNG file beside it.")
@click.argument("sweep", type=click.Path(exists=True, dir_okay=False, path_type=Path))
def main(sweep: Path) -> None:
    """Command line; see the module."""
    try:
        frame = read_sweep(sweep)
    except DSparkError as error:
        raise click.ClickException(str(error)) from error
    if frame["concurrency"].isna().all():
        raise click.ClickException(f"{sweep} has no closed loop to draw; measure it with --concurrency")
    click.echo(write(frame, sweep.parent))


if __name__ == "__main__":
    main()
