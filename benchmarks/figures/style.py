"""What the figures share: colours that mean something, axes, labels at the ends of lines, captions."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator, Sequence
from typing import Any

import matplotlib as mpl
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator, NullLocator, ScalarFormatter

DPI = 150
WIDTH = 8.0

FONT = {
    "font.size": 10,
    "axes.titlesize": 12,
    "axes.titleweight": "bold",
    "axes.titlelocation": "left",
    "axes.spines.top": False,
    "axes.spines.right": False,
}
LIGHT = {**FONT, "text.color": "#1c2127"}
DARK = {
    **FONT,
    **dict.fromkeys(("text.color", "axes.labelcolor", "xtick.color", "ytick.color", "axes.edgecolor"), "#d7dce2"),
    **dict.fromkeys(("figure.facecolor", "axes.facecolor", "savefig.facecolor"), "#161b22"),
}

AUTO, OTHERS = "#2f7de1", ("#7b52ab", "#a8527a", "#6b7f2a", "#8a6d3b")
SAME = {"early-stop": "#0f9d8a", "threshold": "#3aa357"}
FIXED = "YlOrRd"
"""Fixed verify lengths go from light to dark along this map: they are one family."""
FIXED_RANGE = {True: (0.15, 0.7), False: (0.4, 1.0)}
"""Part of the map that shows on a dark ground, and on a light one."""


def styles(frame: pd.DataFrame) -> dict[str, dict[str, Any]]:
    """Colour, marker and line of every configuration: plain grey and dashed, ``auto`` blue and strong."""
    served = frame.drop_duplicates("config")
    lengths = sorted(served.loc[served["policy"] == "static", "verify_len"].dropna().unique())
    low, high = FIXED_RANGE[mpl.rcParams["axes.facecolor"] == DARK["axes.facecolor"]]
    neutral, others, found = mpl.rcParams["text.color"], iter(OTHERS * len(served)), {}
    for label, policy, length in served[["config", "policy", "verify_len"]].itertuples(index=False):
        style = {"linewidth": 1.4, "marker": "o", "markersize": 4.5, "linestyle": "-", "zorder": 3}
        if policy in ("plain", "off"):
            dashes = "--" if policy == "plain" else ":"
            style |= {"color": neutral, "linestyle": dashes, "linewidth": 2.2, "zorder": 4}
        elif policy == "auto":
            style |= {"color": AUTO, "linewidth": 3, "markersize": 6, "zorder": 5}
        elif policy == "static" and length in lengths:
            place = lengths.index(length) / (len(lengths) - 1) if len(lengths) > 1 else 0.5
            style |= {"color": mpl.colormaps[FIXED](low + (high - low) * place)}
        else:
            style |= {"color": SAME.get(policy) or next(others)}
        found[str(label)] = style
    return found


def name(frame: pd.DataFrame, label: str) -> str:
    """The configuration's name without a dtype that all of them share."""
    return label.split("@", maxsplit=1)[0] if frame["dtype"].nunique() == 1 and label.count("@") == 1 else label


def per_config(frame: pd.DataFrame) -> Iterator[tuple[str, dict[str, Any], pd.DataFrame]]:
    """Label, style and rows of every configuration."""
    style = styles(frame)
    for label, rows in frame.groupby("config", sort=False):
        yield str(label), style[str(label)], rows


def spread(rows: pd.DataFrame, column: str, by: str = "concurrency") -> pd.DataFrame:
    """``[by -> median, min, max]`` over the rounds."""
    return rows.groupby(by)[column].agg(["median", "min", "max"]).dropna().astype(float)


def closed_loop(frame: pd.DataFrame) -> pd.DataFrame:
    """The rows with users who wait for their answers."""
    return frame[frame["concurrency"].notna()]


def figure_of(
    frame: pd.DataFrame, num_panels: int = 1, height: float = 5.0, share_x: bool = True
) -> tuple[Figure, list[Axes]]:
    """A figure of stacked panels over a caption that says what was measured, where, and how often."""
    # Without pyplot: no global state, and no display is needed.
    figure = Figure(figsize=(WIDTH, height), layout="constrained")
    figure.supxlabel(textwrap.fill(caption(frame), 125), fontsize=7, alpha=0.7)
    panels = figure.subplots(num_panels, squeeze=False, sharex=share_x)[:, 0]
    for axes in panels:
        axes.grid(alpha=0.2)
    return figure, list(panels)


def users_axis(axes: Axes, frame: pd.DataFrame) -> None:
    """Numbers of users, evenly spaced by doubling."""
    load_axis(axes, closed_loop(frame)["concurrency"], "users at the same time")


def rate_axis(axes: Axes, frame: pd.DataFrame) -> None:
    """Rates of arrival, evenly spaced by doubling."""
    load_axis(axes, frame["rate"].dropna(), "requests per second that arrive (Poisson)")


def load_axis(axes: Axes, values: pd.Series, label: str) -> None:
    """An axis with a tick at every measured value, and room for single points."""
    axes.set_xscale("log", base=2)
    axes.xaxis.set_major_locator(FixedLocator(sorted(values.astype(float).unique())))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.xaxis.set_major_formatter(ScalarFormatter())
    axes.margins(x=0.03)
    axes.set_xlabel(label)


def end_labels(axes: Axes, labels: Sequence[tuple[float, str, Any]], gap: float = 0.058) -> None:
    """Names at the right edge, at the height where each line ends, pushed apart where they would overlap.

    Called when the limits of the axes are final.

    Args:
        labels: height in data units, text, colour.
        gap: between two labels, as a share of the height of the panel.
    """
    low, high = axes.get_ylim()
    # Lines that end in one point get one label: a list of names at one height says nothing.
    ends: dict[float, list[tuple[str, Any]]] = {}
    for height, text, color in labels:
        ends.setdefault(round((height - low) / (high - low), 3), []).append((text, color))
    wanted = [
        (share, _joined([text for text, _ in names], len(labels)), names[0][1]) for share, names in sorted(ends.items())
    ]
    places = spread_out([share for share, _, _ in wanted], gap)
    for place, (share, text, color) in zip(places, wanted, strict=True):
        axes.annotate(
            text,
            xy=(1.005, share),
            xytext=(1.035, place),
            xycoords="axes fraction",
            textcoords="axes fraction",
            va="center",
            color=color,
            fontsize=9,
            fontweight="bold",
            arrowprops={"arrowstyle": "-", "color": color, "linewidth": 0.7, "shrinkA": 0, "shrinkB": 0},
        )


def _joined(names: Sequence[str], num_lines: int) -> str:
    """One label for several lines: a long list would cover its neighbours."""
    if len(names) == num_lines > 1:
        return "all"
    return f"{len(names)} others" if len(names) > 3 else ",\n".join(names)


def spread_out(shares: Sequence[float], gap: float) -> list[float]:
    """Places as close to ``shares`` (ascending) as they can be with ``gap`` between neighbours and none above 1."""
    clusters: list[list[float]] = []  # sum of the members' wishes for the first place, number of members
    for share in shares:
        clusters.append([share, 1])
        while len(clusters) > 1 and _place(clusters[-2]) + gap * clusters[-2][1] > _place(clusters[-1]):
            wish, count = clusters.pop()
            clusters[-1][0] += wish - gap * count * clusters[-1][1]
            clusters[-1][1] += count
    places = [_place(cluster) + gap * i for cluster in clusters for i in range(int(cluster[1]))]
    return [min(place, 1 - gap * (len(places) - 1 - i)) for i, place in enumerate(places)]


def _place(cluster: list[float]) -> float:
    return cluster[0] / cluster[1]


def dodge(frame: pd.DataFrame, label: str) -> float:
    """Factor on the number of users that keeps the bars of several configurations apart."""
    labels = list(frame["config"].unique())
    return float(2 ** (0.025 * (labels.index(label) - (len(labels) - 1) / 2)))


def caption(frame: pd.DataFrame) -> str:
    """What was measured, where, and how many rounds."""
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
