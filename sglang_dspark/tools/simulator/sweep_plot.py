"""A simulated sweep as a figure."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from sglang_dspark.tools.simulator.sweep import Point

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_PANELS = {
    "output_tok_s": "output tokens per second, all users",
    "user_tok_s": "output tokens per second, one user",
    "verify_len": "drafts verified per request and step",
    "wasted": "share of verified drafts rejected",
    "parked": "share of steps without drafting",
    "tpot_ms": "milliseconds per output token",
}


def sweep_figure(points: Sequence[Point], caption: str) -> Figure:
    """A panel per figure, a line per policy, over users or arrivals per second.

    Args:
        caption: what was simulated, below the panels.
    """
    # Without pyplot: no global state, and no display is needed.
    import matplotlib as mpl
    from matplotlib.figure import Figure
    from matplotlib.ticker import FixedLocator, NullLocator, ScalarFormatter

    closed = points[0].users is not None
    loads = sorted({float(_load(point)) for point in points})
    policies = list(dict.fromkeys(point.policy for point in points))
    figure = Figure(figsize=(11, 6.6), layout="constrained")
    panels = figure.subplots(2, 3, sharex=True)
    for axes, (name, title) in zip(panels.ravel(), _PANELS.items(), strict=True):
        for index, policy in enumerate(policies):
            mine = sorted((point for point in points if point.policy == policy), key=_load)
            axes.plot(
                [_load(point) for point in mine],
                [getattr(point.figures, name) for point in mine],
                color=mpl.colormaps["tab10"](index % 10),
                linestyle="--" if policy == "off" else "-",
                marker=".",
                label=policy,
            )
        axes.set_title(title, fontsize=9)
        axes.set_xscale("log", base=2)
        axes.xaxis.set_major_locator(FixedLocator(loads))
        axes.xaxis.set_minor_locator(NullLocator())
        axes.xaxis.set_major_formatter(ScalarFormatter())
        axes.set_ylim(0, 1.02 if name in ("wasted", "parked") else None)
        axes.grid(alpha=0.3)
    for axes in panels[-1]:
        axes.set_xlabel("concurrent users" if closed else "arrivals per second")
    panels[0, 0].legend(frameon=False, fontsize=8)
    figure.supxlabel(caption, fontsize=7, color="0.35")
    return figure


def _load(point: Point) -> float:
    return float(point.users if point.users is not None else point.rate or 0.0)
