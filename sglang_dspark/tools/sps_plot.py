"""The SPS table as a figure."""

from __future__ import annotations

from typing import TYPE_CHECKING

from sglang_dspark.scheduling.sps_table import SpsTable

if TYPE_CHECKING:
    from matplotlib.figure import Figure

PANEL_INCHES = (4.2, 3.6)


def sps_figure(table: SpsTable) -> Figure:
    """Step time and steps per second over the tokens in the verify forward, a line per number of requests.

    Circles are plain steps; solid lines are whole steps, drafting the full block included, dotted lines the verify
    forward alone. One column of panels per context length.
    """
    # Without pyplot: no global state, and no display is needed.
    import matplotlib as mpl
    from matplotlib.figure import Figure

    columns = len(table.contexts)
    figure = Figure(figsize=(PANEL_INCHES[0] * columns, 2 * PANEL_INCHES[1]), layout="constrained")
    panels = figure.subplots(2, columns, squeeze=False, sharex=True, sharey="row")
    colors = mpl.colormaps["viridis"].resampled(len(table.requests) + 1)
    for c, context in enumerate(table.contexts):
        for r, requests in enumerate(table.requests):
            tokens = [requests * (1 + drafts) for drafts in table.drafts]
            verify = table.verify_ms[r, :, c]
            whole = verify + table.draft_ms[r, -1, c]
            for axes, scale in ((panels[0, c], lambda ms: ms), (panels[1, c], lambda ms: 1e3 / ms)):
                axes.plot(tokens[1:], scale(whole[1:]), color=colors(r), marker=".", label=f"{requests}")
                axes.plot(tokens, scale(verify), color=colors(r), linestyle=":", linewidth=1)
                axes.plot(tokens[:1], scale(verify[:1]), color=colors(r), marker="o", fillstyle="none")
        panels[0, c].set_title(f"{context} tokens of context", fontsize=10)
        panels[1, c].set_xlabel("tokens in the verify forward")
    panels[0, 0].set_ylabel("milliseconds per step")
    panels[1, 0].set_ylabel("steps per second, SPS")
    panels[0, 0].legend(title="requests", fontsize=8, frameon=False)
    for axes in panels.ravel():
        axes.set_xscale("log", base=2)
        axes.set_ylim(bottom=0)
        axes.grid(alpha=0.3)
    return figure
