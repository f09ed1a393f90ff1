"""Reliability diagrams: what was predicted against what happened."""

from __future__ import annotations

from typing import TYPE_CHECKING

from sglang_dspark.calibration.metrics import ReliabilityBins, reliability_bins
from sglang_dspark.tools.calibrate.held_out import HeldOut

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

COLUMNS = 4
PANEL_INCHES = 2.6
LARGEST_DOT = 90.0
FEWEST_ROUNDS = 20
"""A bin with fewer is not drawn: at a share of one half, the error of 20 outcomes is 0.11 already."""


def reliability_figure(held_out: HeldOut, caption: str) -> Figure:
    """One panel per draft: observed against predicted prefix survival, before, after, and with shifts.

    Areas of dots are proportional to rounds.

    Args:
        caption: what was measured, below the panels.
    """
    # Without pyplot: no global state, and no display is needed.
    from matplotlib.figure import Figure

    gamma = held_out.outcomes.shape[1]
    columns = min(gamma, COLUMNS)
    rows = -(-gamma // columns)
    figure = Figure(figsize=(PANEL_INCHES * columns, PANEL_INCHES * rows + 0.8), layout="compressed")
    panels = figure.subplots(rows, columns, sharex=True, sharey=True, squeeze=False).ravel()
    for k, axes in enumerate(panels[:gamma]):
        axes.plot([0, 1], [0, 1], color="0.7", linewidth=1, zorder=0)
        for predicted, color, label in (
            (held_out.before, "tab:red", "before"),
            (held_out.after, "tab:blue", "after"),
            (held_out.shifted, "tab:green", "shifted"),
        ):
            bins = reliability_bins(predicted[:, k], held_out.outcomes[:, k])
            _draw(axes, bins, color, f"{label}: ECE {bins.ece:.1%}")
        axes.set_title(f"draft {k + 1}", fontsize=9)
        axes.legend(frameon=False, fontsize=7, loc="upper left")
        # Also where the row below ends earlier.
        axes.tick_params(labelsize=7, labelbottom=k + columns >= gamma)
        axes.set(xlim=(0, 1), ylim=(0, 1), aspect="equal")
        axes.grid(alpha=0.3)
    for axes in panels[gamma:]:
        axes.set_axis_off()
    figure.supxlabel(f"predicted survival\n{caption}", fontsize=9)
    figure.supylabel("observed survival", fontsize=9)
    return figure


def _draw(axes: Axes, bins: ReliabilityBins, color: str, label: str) -> None:
    shown = bins.counts >= FEWEST_ROUNDS
    points = bins.predicted[shown], bins.observed[shown]
    axes.plot(*points, color=color, linewidth=1, label=label)
    areas = LARGEST_DOT * bins.counts[shown] / bins.counts.max()
    # Dots at 0 and 1 would be cut in half by the frame.
    axes.scatter(*points, areas, color=color, alpha=0.5, clip_on=False)
