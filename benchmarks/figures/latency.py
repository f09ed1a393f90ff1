"""What a user waits for, and what is delivered within a promise."""

from __future__ import annotations

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import PercentFormatter

from figures.style import closed_loop, end_labels, figure_of, name, per_config, rate_axis, spread, users_axis


def latency_vs_rate(frame: pd.DataFrame) -> Figure:
    """Time to first token and time per output token of the slowest twentieth of the requests, over their rate."""
    frame = frame[frame["rate"].notna()]
    figure, panels = figure_of(frame, 2, 7.4)
    titles = {
        "ttft_p95_ms": "Time to first token, ms: 95 % of the requests waited no longer",
        "tpot_p95_ms": "Time per further token, ms: 95 % of the requests were at least as fast",
    }
    for axes, (column, title) in zip(panels, titles.items(), strict=True):
        _draw(axes, frame, column, "rate", (0, None))
        axes.set_title(title)
    rate_axis(panels[-1], frame)
    return figure


def goodput_vs_load(frame: pd.DataFrame) -> Figure:
    """Share of the requests that were served as promised, over users and, where measured, over the rate of arrivals."""
    kept = frame[frame["sla_met_share"].notna()]
    kinds = [
        ("concurrency", users_axis, closed_loop(kept)),
        ("rate", rate_axis, kept[kept["rate"].notna()]),
    ]
    shown = [kind for kind in kinds if not kind[2].empty]
    figure, panels = figure_of(kept, len(shown), 1 + 4.0 * len(shown), share_x=False)
    for axes, (by, scale, rows) in zip(panels, shown, strict=True):
        _draw(axes, rows, "sla_met_share", by, (-0.04, 1.04))
        axes.yaxis.set_major_formatter(PercentFormatter(1))
        scale(axes, rows)
    panels[0].set_title(f"Share of the requests with\n{promise(kept)}")
    return figure


def promise(frame: pd.DataFrame) -> str:
    """The promise in words."""
    parts = []
    for column, what in (("sla_ttft_ms", "first token within"), ("sla_tpot_ms", "each further one within")):
        limits = ", ".join(f"{limit:g}" for limit in frame[column].dropna().unique())
        if limits:
            parts.append(f"{what} {limits} ms")
    return " and ".join(parts)


def _draw(axes: Axes, frame: pd.DataFrame, column: str, by: str, limits: tuple[float, float | None]) -> None:
    ends = []
    for label, style, rows in per_config(frame):
        points = spread(rows, column, by)
        if points.empty:
            continue
        middle = points["median"]
        bars = [middle - points["min"], points["max"] - middle]
        axes.errorbar(points.index.to_numpy(float), middle, yerr=bars, label=label, elinewidth=0.8, capsize=2, **style)
        ends.append((middle.iloc[-1], name(frame, label), style["color"]))
    axes.set_ylim(*limits)
    end_labels(axes, ends)
