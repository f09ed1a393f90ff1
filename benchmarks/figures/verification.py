"""What the target was asked to verify, and how much of it in vain."""

from __future__ import annotations

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import PercentFormatter
from serving.results import over_rounds

from figures.style import closed_loop, end_labels, figure_of, name, per_config, users_axis


def verification_vs_concurrency(frame: pd.DataFrame) -> Figure:
    """Drafts verified per request and step, accept length, and share of plain steps, over the number of users."""
    frame = closed_loop(frame[frame["decode_rounds"].notna()])
    figure, panels = figure_of(frame, 3, 9.6)
    titles = {
        "mean_verify_len": "Drafts verified per request and step",
        "accept_length": "Tokens that a step adds to a request (accept length)",
        "plain_share": "Share of steps in which nothing was drafted (parked)",
    }
    limits = {"mean_verify_len": (0, None), "accept_length": (1, None), "plain_share": (-0.04, 1.04)}
    for axes, (column, title) in zip(panels, titles.items(), strict=True):
        _draw(axes, frame, column, limits[column])
        axes.set_title(title)
    panels[2].yaxis.set_major_formatter(PercentFormatter(1))
    users_axis(panels[-1], frame)
    return figure


def waste_vs_load(frame: pd.DataFrame) -> Figure:
    """Share of verified drafts that were rejected, over the requests that were in the server at the same time.

    Closed and open loops share the axis. Files that lack the measured occupancy are drawn over the number of users.
    """
    frame = frame[frame["wasted_share"].notna()]
    occupancy = "in_flight" if "in_flight" in frame else "concurrency"
    figure, (axes,) = figure_of(frame)
    ends = []
    for label, style, rows in per_config(frame):
        points = by_load(rows, "load", occupancy, "wasted_share").sort_values(occupancy)
        axes.plot(points[occupancy], points["wasted_share"], label=label, **style)
        ends.append((points["wasted_share"].iloc[-1], name(frame, label), style["color"]))
    if occupancy == "concurrency":
        users_axis(axes, frame)
    else:
        axes.set_xscale("log", base=2)
        axes.xaxis.set_major_formatter("{x:g}")
        axes.set_xlabel("requests in the server at the same time, on average")
    axes.set_ylim(0, 1)
    axes.yaxis.set_major_formatter(PercentFormatter(1))
    axes.set_title("Share of verified drafts that the target rejected (wasted)")
    end_labels(axes, ends)
    return figure


def by_load(rows: pd.DataFrame, load: str, *columns: str) -> pd.DataFrame:
    """``[load -> columns]`` of one configuration, over its rounds."""
    groups = rows.groupby(load, sort=True)
    return pd.DataFrame(
        {column: {key: over_rounds(cells, column) for key, cells in groups} for column in columns}, dtype=float
    )


def _draw(axes: Axes, frame: pd.DataFrame, column: str, limits: tuple[float, float | None]) -> None:
    ends = []
    for label, style, rows in per_config(frame):
        points = by_load(rows, "concurrency", column).dropna()
        if points.empty:
            continue
        axes.plot(points.index.to_numpy(float), points[column], label=label, **style)
        ends.append((points[column].iloc[-1], name(frame, label), style["color"]))
    axes.set_ylim(*limits)
    end_labels(axes, ends, gap=0.085)
