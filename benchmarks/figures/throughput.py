"""How fast: all users together, one of them, and against plain serving."""

from __future__ import annotations

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import ScalarFormatter
from paired_ratio import frame_baselines
from serving.configurations import OFF, PLAIN
from serving.frontier import Crossover, crossovers, pareto, shown_baselines, user_ratios

from figures.style import closed_loop, dodge, end_labels, figure_of, name, per_config, spread, styles, users_axis
from sglang_dspark.config import POLICY_NAMES


def throughput_vs_concurrency(frame: pd.DataFrame) -> Figure:
    """Output tokens per second of all users over their number, and the two ratios: never one that mixes them."""
    frame = closed_loop(frame)
    ratios = user_ratios(frame, frame_baselines(frame))
    baselines = shown_baselines(ratios)
    figure, panels = figure_of(frame, 1 + len(baselines), 5.0 + 3.4 * len(baselines))
    ends = []
    for label, style, rows in per_config(frame):
        points = spread(rows, "output_tok_s")
        x, middle = points.index.to_numpy(float) * dodge(frame, label), points["median"]
        bars = [middle - points["min"], points["max"] - middle]
        panels[0].errorbar(x, middle, yerr=bars, label=label, elinewidth=0.8, capsize=2, **style)
        ends.append((middle.iloc[-1], name(frame, label), style["color"]))
    panels[0].set_title("Output tokens per second, all users together")
    panels[0].set_ylim(bottom=0)
    end_labels(panels[0], ends)
    for axes, against in zip(panels[1:], baselines, strict=True):
        _draw_ratios(axes, frame, ratios[ratios["against"] == against], against)
    users_axis(panels[-1], frame)
    return figure


def ratio_title(ratios: pd.DataFrame, against: str) -> str:
    """What a panel of ratios to one baseline shows."""
    if against == OFF:
        return 'Speculation: times "off"'
    policies = set(ratios["policy"])
    if policies & (set(POLICY_NAMES) - {OFF}):
        return "Times plain SGLang (the plugin's own step and speculation in one)"
    return "Without drafts: times plain SGLang" if policies <= {OFF, PLAIN} else "Times plain SGLang"


def _draw_ratios(axes: Axes, frame: pd.DataFrame, ratios: pd.DataFrame, against: str) -> None:
    style, ends = styles(frame), []
    for label, points in ratios.groupby("config", sort=False):
        x, middle = points["concurrency"].to_numpy(float) * dodge(frame, str(label)), points["ratio"]
        bars = [middle - points["low"], points["high"] - middle]
        axes.errorbar(x, middle, yerr=bars, label=label, elinewidth=0.8, capsize=2, **style[str(label)])
        ends.append((middle.iloc[-1], name(frame, str(label)), style[str(label)]["color"]))
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
        axes.annotate(text, (0.015, 0.03), xycoords="axes fraction", fontsize=8, va="bottom", wrap=True)
    end_labels(axes, ends)


def crossover_text(frame: pd.DataFrame, found: list[Crossover], against: str) -> str:
    """Where the baseline, named by its policy, overtakes what speculates; empty where nothing speculates."""
    crossed = [f"{name(frame, c.config)} beyond about {c.users:.2g} users" for c in found if c.users is not None]
    behind = [name(frame, c.config) for c in found if c.users is None and c.ratio_at_most < 1]
    parts = []
    if crossed:
        parts.append(f"✖ {against} overtakes {', '.join(crossed)} (interpolated)")
    if behind:
        parts.append(f"behind {against} from the start: {', '.join(behind)}")
    if found and not parts:
        users = int(closed_loop(frame)["concurrency"].max())
        parts.append(f"No crossover: all are ahead of {against} at {users} users")
    return "; ".join(parts)


def throughput_vs_user_speed(frame: pd.DataFrame) -> Figure:
    """Output tokens per second of all users over those of one user, with the Pareto frontier.

    Up and to the right is better: more tokens from the machine at the same speed for each user, or the reverse.
    """
    frame = closed_loop(frame)
    figure, (axes,) = figure_of(frame, height=6.2)
    points: list[tuple[float, float, int, str]] = []
    for label, style, rows in per_config(frame):
        one, everyone = spread(rows, "per_user_tok_s"), spread(rows, "output_tok_s")
        shown = {**style, "linewidth": 0.7 * style["linewidth"], "alpha": 0.9}
        axes.plot(one["median"], everyone["median"], label=name(frame, label), **shown)
        points += [(one["median"][users], everyone["median"][users], int(users), label) for users in one.index]
    frontier = [points[index] for index in pareto([point[:2] for point in points])]
    neutral = axes.yaxis.label.get_color()
    axes.step(
        [0, *(x for x, *_ in frontier), frontier[-1][0]],
        [frontier[0][1], *(y for _, y, *_ in frontier), 0],
        where="pre",
        color=neutral,
        alpha=0.16,
        linewidth=9,
        solid_joinstyle="round",
        zorder=1,
        label="Pareto frontier",
    )
    named: set[int] = set()
    for x, y, users, _ in frontier:
        if users in named:
            continue
        named.add(users)
        axes.annotate(_users(users), (x, y), xytext=(8, 6), textcoords="offset points", fontsize=8.5, zorder=7)
    plain = set(frame.loc[frame["policy"] == "plain", "config"])
    for x, y, users, label in points:
        if label in plain and (x, y, users, label) not in frontier:
            axes.annotate(
                _users(users), (x, y), xytext=(-6, -4), textcoords="offset points", fontsize=8.5, ha="right", va="top"
            )
    axes.set_xlim(0, 1.12 * max(x for x, *_ in points))
    axes.set_ylim(0, 1.08 * max(y for _, y, *_ in points))
    axes.set_title("Up and to the right is better; one point per number of users")
    axes.set_xlabel("output tokens per second that one user sees")
    axes.set_ylabel("output tokens per second, all users together")
    axes.legend(frameon=False, fontsize=9)
    return figure


def _users(count: int) -> str:
    return f"{count} user{'' if count == 1 else 's'}"
