"""The tables that ``simulate`` prints."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.table import Table

    from sglang_dspark.tools.simulator.check import Comparison
    from sglang_dspark.tools.simulator.crossover import CrossoverModel
    from sglang_dspark.tools.simulator.published import AcceptLength, BudgetPoint, ThresholdPoint
    from sglang_dspark.tools.simulator.sweep import Point

_NAMES = ("policy", "drafter", "domain", "engine")


def of_model(model: CrossoverModel, users: Sequence[int]) -> Table:
    """The crossover model at some numbers of users."""
    from sglang_dspark.tools.simulator.crossover import POLICIES

    table = _new_table("users", "policy", "verify", "accept length", "one user", "to plain", "wasted")
    for count in users:
        plain = model.point("plain", count)
        for policy in POLICIES:
            point = model.point(policy, count)
            ratio = f"{point.user_speed / plain.user_speed:.2f}"
            cells = (f"{point.accept_length:.2f}", f"{point.user_speed:.2f}", ratio, f"{point.wasted:.0%}")
            table.add_row(str(count), policy, str(point.verify_len), *cells, end_section=policy == POLICIES[-1])
    return table


def of_accept_lengths(lengths: Sequence[AcceptLength]) -> Table:
    """Table 1 beside Fig. 2."""
    title = "Accept length, Qwen3-4B, block size 7, temperature 1: means of Table 1, and Fig. 2 multiplied out"
    table = _new_table("drafter", "domain", "Table 1", "from Fig. 2", "difference", title=title)
    for one in lengths:
        difference = f"{one.computed / one.published - 1:+.1%}"
        table.add_row(one.drafter, one.domain, f"{one.published:.2f}", f"{one.computed:.2f}", difference)
    return table


def of_thresholds(points: Sequence[ThresholdPoint]) -> Table:
    """Fig. 5 beside simulated blocks."""
    title = "Tokens committed / verified per step by threshold: Fig. 5, and blocks drawn by Fig. 2"
    shown = [point for point in points if round(10 * point.threshold) in (0, 3, 5, 6, 7, 8, 9)]
    headings = [f"{point.threshold:.1f}" for point in shown if point.domain == points[0].domain]
    table = _new_table("domain", "", *headings, title=title)
    for domain, group in groupby(shown, key=lambda point: point.domain):
        own = list(group)
        table.add_row(domain, "paper", *(f"{p.published_committed:.2f}/{p.published_verified:.2f}" for p in own))
        table.add_row("", "ours", *(f"{p.committed:.2f}/{p.verified:.2f}" for p in own), end_section=True)
    return table


def of_budgets(points: Sequence[BudgetPoint]) -> Table:
    """Fig. 8 beside simulated budgets."""
    title = (
        "Tokens verified per request and step: Fig. 8, and auto on its step times with the chat acceptance of Fig. 2"
    )
    table = _new_table("engine", "requests", "Fig. 8", "simulated", "difference", title=title)
    for point in points:
        difference = f"{point.simulated / point.published - 1:+.0%}"
        figures = (f"{point.published:.2f}", f"{point.simulated:.2f}", difference)
        table.add_row(point.engine, str(point.requests), *figures)
    return table


def of_points(points: Sequence[Point]) -> Table:
    """A simulated sweep."""
    load = "users" if points[0].users is not None else "arrivals/s"
    table = _new_table(
        "policy", load, "tok/s", "one user", "TTFT ms", "TPOT ms", "accept length", "verify", "wasted", "parked"
    )
    for index, point in enumerate(points):
        f = point.figures
        table.add_row(
            point.policy,
            str(point.users if point.users is not None else f"{point.rate:g}"),
            f"{f.output_tok_s:.1f}",
            f"{f.user_tok_s:.1f}",
            f"{f.ttft_ms:.0f}",
            f"{f.tpot_ms:.1f}",
            f"{f.accept_length:.2f}",
            f"{f.verify_len:.2f}",
            f"{f.wasted:.0%}",
            f"{f.parked:.0%}",
            end_section=points[min(index + 1, len(points) - 1)].policy != point.policy,
        )
    return table


def of_comparisons(comparisons: Sequence[Comparison], tolerance: float) -> Table:
    """Simulated beside measured points; errors beyond the tolerance have a star."""
    columns = ("tok/s", "rounds", "simu- lated", "error", "step ms", "simu- lated", "verify", "simu- lated")
    table = _new_table("users", "policy", *columns)
    for c in comparisons:
        m, mark = c.measured, "" if abs(c.error) <= tolerance else "*"
        verify = (f"{m.verify_len:.1f}", f"{c.verify_len:.1f}") if c.measured.decides else ("", "")
        table.add_row(
            str(m.users),
            m.label,
            f"{m.tok_s:.1f}",
            f"{m.slowest:.0f}-{m.fastest:.0f}",
            f"{c.tok_s:.1f}",
            f"{c.error:+.1%}{mark}",
            f"{m.step_ms:.1f}",
            f"{c.step_ms:.1f}",
            *verify,
        )
    return table


def of_predictions(comparisons: Sequence[Comparison]) -> Table:
    """By users: what no number of the sweep was given for, and how well the order of the policies is met."""
    from sglang_dspark.tools.simulator.check import rank_ceilings, rank_correlations

    ranks, ceilings = rank_correlations(comparisons), rank_ceilings([c.measured for c in comparisons])
    deciding = list(dict.fromkeys(c.measured.label for c in comparisons if c.measured.decides))
    headings = [f"{label}: {what}" for label in deciding for what in ("drafts", "accept length")]
    title = (
        "Predicted against measured, and Spearman's rank correlation of the policies' speeds: found, and what no error "
        "at all would give, by what the rounds of the sweep differ"
    )
    table = _new_table("users", *headings, "ranks", "at best", title=title)
    for users in dict.fromkeys(c.measured.users for c in comparisons):
        by_label = {c.measured.label: c for c in comparisons if c.measured.users == users}
        cells = []
        for c in (by_label.get(label) for label in deciding):
            lengths = ((c.verify_len, c.measured.verify_len), (c.accept_length, c.measured.accept_length)) if c else ()
            cells += [f"{ours:.2f} / {theirs:.2f}" for ours, theirs in lengths] or ["-", "-"]
        table.add_row(
            str(users), *cells, *(f"{found[users]:.2f}" if users in found else "-" for found in (ranks, ceilings))
        )
    return table


def _new_table(*headings: str, title: str | None = None) -> Table:
    from rich.box import SIMPLE_HEAD
    from rich.table import Table

    table = Table(box=SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0), title=title, title_justify="left")
    for heading in headings:
        table.add_column(heading, justify="left" if heading in _NAMES else "right")
    return table
