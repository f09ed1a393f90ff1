"""Draws the throughput of a sweep over the number of users; report.py writes the figure beside its page.

The upper panel shows tokens per second of all users, the panels below the ratios of report.py, each to its own
baseline. Points are medians over the rounds, ratios their geometric means, and bars reach from the slowest round to the
fastest.
"""

from __future__ import annotations

import textwrap
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import matplotlib as mpl
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator, NullLocator, ScalarFormatter
from paired_ratio import frame_baselines, paired_ratios, summarise
from serving.configurations import OFF, PLAIN
from serving.results import config_name

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
FIXED = "YlOrRd"
"""Fixed verify lengths go from light to dark along the part of this map that shows on a white ground."""


def draw(frame: pd.DataFrame, record: Mapping[str, Any]) -> Figure:
    """Draw output tokens per second of all users over their number, and the two ratios: never one that mixes them.

    Args:
        frame: rows of the sweep.
        record: its ``provenance.json``.
    """
    baselines = frame_baselines(frame)
    served = frame.drop_duplicates("config").set_index("config")["policy"]
    # What the plugin gains without drafts comes first, then what speculation adds.
    against = [policy for policy in (PLAIN, OFF) if any(served[b] == policy for c, b in baselines.items() if c != b)]
    # Without pyplot: no global state, and no display is needed.
    figure = Figure(figsize=(WIDTH, 5.0 + 3.4 * len(against)), layout="constrained")
    figure.supxlabel(textwrap.fill(caption(frame, record), 125), fontsize=7, alpha=0.7)
    panels = list(figure.subplots(1 + len(against), squeeze=False, sharex=True)[:, 0])
    speeds = frame.groupby(["config", "concurrency"], sort=False)["output_tok_s"].agg(["median", "min", "max"])
    _lines(panels[0], frame, speeds)
    panels[0].set_title("Output tokens per second, all users together")
    panels[0].set_ylim(bottom=0)
    panels[0].legend(frameon=False)
    pairs = paired_ratios(frame, "output_tok_s", baselines)
    for axes, policy in zip(panels[1:], against, strict=True):
        told = summarise(pairs[pairs["baseline"].map(served) == policy])
        told["concurrency"] = told["load"].map(dict(zip(frame["load"], frame["concurrency"], strict=True)))
        _lines(axes, frame, told.set_index(["config", "concurrency"])[["ratio", "smallest", "largest"]])
        axes.set_title(f"{ratio_title(policy, set(served[list(told['config'])]))}, paired by round (shaded: slower)")
        _shade_slower(axes)
    for axes in panels:
        axes.grid(alpha=0.2)
    _users_axis(panels[-1], frame)
    return figure


def ratio_title(baseline: str, policies: set[str]) -> str:
    """Return the title of a panel with ratios of these policies to a baseline."""
    if baseline == OFF:
        return 'Speculation: times "off"'
    return "Without drafts: times plain SGLang" if policies <= {OFF, PLAIN} else "Times plain SGLang"


def caption(frame: pd.DataFrame, record: Mapping[str, Any]) -> str:
    """Say what was measured, on what machine, and in how many rounds."""
    rounds = frame["round"].nunique()
    dtype = f", {frame['dtype'].iloc[0]}" if frame["dtype"].nunique() == 1 else ""
    versions = " ".join(f"{name}={number}" for name, number in record["versions"].items())
    return (
        f"{record['target']}{dtype} on {record['hardware']['gpu'] or record['hardware']['cpu']}; prompts "
        f"{prompt_names(record)}; points: median of {rounds} round{'s' if rounds > 1 else ''}, bars: slowest to "
        f"fastest round; {versions}; commit {record['commit'][:12]}"
    )


def prompt_names(record: Mapping[str, Any]) -> str:
    """Return the names of the prompt files of a sweep."""
    return ", ".join(Path(prompts["file"]).stem for prompts in record["prompts"])


def styles(frame: pd.DataFrame) -> dict[str, dict[str, Any]]:
    """Return how each line looks: plain and ``off`` broken, ``auto`` blue and strong, fixed lengths light to dark."""
    served = frame.drop_duplicates("config").set_index("config")
    lengths = served.loc[served["policy"] == "static", "verify_len"].dropna().astype(float)
    others, found = iter(OTHERS * len(served)), {}
    for label, policy in served["policy"].items():
        style: dict[str, Any] = {"linewidth": 1.4, "marker": "o", "markersize": 4.5, "zorder": 3}
        if policy in (PLAIN, OFF):
            style |= {"color": INK, "linestyle": "--" if policy == PLAIN else ":", "linewidth": 2.2, "zorder": 4}
        elif policy == "auto":
            style |= {"color": AUTO, "linewidth": 3, "markersize": 6, "zorder": 5}
        elif label in lengths:
            style["color"] = mpl.colormaps[FIXED](0.4 + 0.6 * lengths.rank(pct=True)[label])
        else:
            style["color"] = next(others)
        found[str(label)] = style
    return found


def _lines(axes: Axes, frame: pd.DataFrame, points: pd.DataFrame) -> None:
    """Draw a line per configuration.

    Args:
        points: middle, low and high, by configuration and number of users.
    """
    labels, style = list(frame["config"].unique()), styles(frame)
    for label, rows in points.groupby(level=0, sort=False, observed=True):
        middle, low, high = (rows[name].to_numpy(float) for name in rows)
        # Keeps the bars of several configurations apart.
        dodge = 2 ** (0.025 * (labels.index(label) - (len(labels) - 1) / 2))
        x = rows.index.get_level_values(1).to_numpy(float) * dodge
        name, bars = config_name(frame, str(label)), [middle - low, high - middle]
        axes.errorbar(x, middle, yerr=bars, label=name, elinewidth=0.8, capsize=2, **style[str(label)])


def _shade_slower(axes: Axes) -> None:
    neutral = axes.yaxis.label.get_color()
    axes.axhline(1, color=neutral, linestyle="--", linewidth=1.6)
    low, high = axes.get_ylim()
    axes.set_ylim(min(low, 0.85), max(high, 1.15))
    axes.axhspan(axes.get_ylim()[0], 1, color=neutral, alpha=0.07, zorder=0)
    axes.yaxis.set_major_formatter(ScalarFormatter())


def _users_axis(axes: Axes, frame: pd.DataFrame) -> None:
    """Give the axis a tick at every measured number of users, evenly spaced by doubling, and room for single points."""
    axes.set_xscale("log", base=2)
    axes.xaxis.set_major_locator(FixedLocator(sorted(frame["concurrency"].astype(float).unique())))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.xaxis.set_major_formatter(ScalarFormatter())
    axes.margins(x=0.03)
    axes.set_xlabel("users at the same time")


def write(frame: pd.DataFrame, record: Mapping[str, Any], folder: Path) -> Path:
    """Write the figure into ``folder`` and return its path."""
    path = folder / FILE
    with mpl.rc_context(LOOK):
        draw(frame, record).savefig(path, dpi=DPI)
    return path
