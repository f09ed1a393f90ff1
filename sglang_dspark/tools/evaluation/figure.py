"""Draws an evaluation as a figure."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from sglang_dspark.calibration.metrics import reliability_bins
from sglang_dspark.tools.evaluation.measured_set import MeasuredSet

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

PANEL_INCHES = (4.6, 3.6)
# Thresholds below 0.3 hardly cut anything: their labels would lie on each other.
_FIRST_LABEL = 3
# A reliability bin with fewer is not drawn: at a share of one half, the error of 20 outcomes is 0.11 already.
_FEWEST_ROUNDS = 20


def evaluation_figure(sets: Sequence[MeasuredSet], caption: str) -> Figure:
    """Draw conditional acceptance and survival by position, the threshold sweep and a reliability diagram of every set.

    The last two say so if there is no confidence head.

    Args:
        caption: what was measured, below the panels.
    """
    # Without pyplot: no global state, and no display is needed.
    import matplotlib as mpl
    from matplotlib.figure import Figure

    figure = Figure(figsize=(2 * PANEL_INCHES[0], 2 * PANEL_INCHES[1]), layout="constrained")
    (conditional, survival), (thresholds, reliability) = figure.subplots(2, 2)
    for index, measured in enumerate(sets):
        color = mpl.colormaps["tab10"](index % 10)
        positions = range(1, measured.gamma + 1)
        label = f"{measured.name}: accept length {measured.accept_length:.2f}"
        conditional.plot(positions, measured.conditional, color=color, marker="o", label=label)
        survival.plot(positions, measured.survival, color=color, marker="o")
        sweep = measured.thresholds()
        thresholds.plot(
            [row["verified"] for row in sweep], [row["accept_length"] for row in sweep], color=color, marker="."
        )
        if index == 0:
            for row in sweep[_FIRST_LABEL:-1]:
                place = row["verified"], row["accept_length"]
                thresholds.annotate(f"{row['threshold']:g}", place, xytext=(3, -9), textcoords="offset points", size=7)
        _draw_reliability(reliability, measured, color)
    titles = {
        conditional: "accepted, all before it being accepted",
        survival: "accepted with all before it (survival)",
    }
    for axes, title in titles.items():
        axes.set(title=title, xlabel="draft", ylim=(0, 1))
        axes.xaxis.get_major_locator().set_params(integer=True)
    conditional.legend(frameon=False, fontsize=8)
    thresholds.set(
        title="threshold on the raw confidence", xlabel="tokens verified per round", ylabel="tokens committed per round"
    )
    reliability.set(
        title="reliability of the raw head's survival", xlabel="predicted", ylabel="observed", xlim=(0, 1), ylim=(0, 1)
    )
    headless = all(measured.logits is None for measured in sets)
    few = "no confidence head" if headless else f"fewer than {_FEWEST_ROUNDS} rounds in every bin"
    for axes, words in ((thresholds, "no confidence head"), (reliability, few)):
        if not any(len(line.get_xdata()) for line in axes.lines):
            axes.text(0.5, 0.5, words, transform=axes.transAxes, ha="center", va="center", color="0.35")
    reliability.plot([0, 1], [0, 1], color="0.7", linewidth=1, zorder=0)
    for axes in (conditional, survival, thresholds, reliability):
        axes.grid(alpha=0.3)
    figure.supxlabel(caption, fontsize=7, color="0.35", wrap=True)
    return figure


def _draw_reliability(axes: Axes, measured: MeasuredSet, color: tuple[float, ...]) -> None:
    """Draw all positions together."""
    if measured.predicted is None:
        return
    bins = reliability_bins(measured.predicted.ravel(), measured.outcomes.ravel())
    shown = bins.counts >= _FEWEST_ROUNDS
    axes.plot(bins.predicted[shown], bins.observed[shown], color=color, marker=".", label=f"ECE {bins.ece:.1%}")
    axes.legend(frameon=False, fontsize=8)
