"""Make one answer of those of all replicas: each has a scheduler of its own, which counts and decides alone."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import wraps
from typing import TypedDict, TypeVar

from sglang_dspark.features.reports import versions
from sglang_dspark.features.reports.first_drafts import fit_of
from sglang_dspark.features.reports.recent import Span
from sglang_dspark.features.reports.sums import Sums, SumsLists

Json = dict[str, object]
A = TypeVar("A")
Report = Callable[[Sequence[A]], Json]
"""Returns JSON of the answers of all schedulers, replica 0 first."""


class StatsAnswer(TypedDict):
    """The answer of a scheduler that is asked for its statistics."""

    uptime_s: float
    state: Json
    versions: Sequence[versions.Count]
    sums: SumsLists
    recent: Span
    counted: dict[str, dict[str, float]]


class SwitchedAnswer(TypedDict):
    """The answer of a scheduler that has taken another policy."""

    state: Json
    until_now: dict[str, float]


def _and_of_each(report: Report[A]) -> Report[A]:
    """Return a report that has, if there are several replicas, that of each under ``replicas``."""

    @wraps(report)
    def of_all(answers: Sequence[A]) -> Json:
        each: Json = {"replicas": [report([answer]) for answer in answers]} if len(answers) > 1 else {}
        return report(answers) | each

    return of_all


@_and_of_each
def stats(answers: Sequence[StatsAnswer]) -> Json:
    """Return the JSON of ``GET /dspark/stats``: counts and speeds are added up, and figures made of the sums.

    Of the state of several schedulers it has what is the same in all of them.
    """
    recent = [answer["recent"] for answer in answers]
    return {
        "uptime_s": max(answer["uptime_s"] for answer in answers),
        **_in_common([answer["state"] for answer in answers]),
        "weight_versions": versions.report(answer["versions"] for answer in answers),
        "drafter_fit": fit_of(*(answer["versions"][-1]["first_drafts"] for answer in answers)).report(),
        **Sums.of(answer["sums"] for answer in answers).report(),
        **{name: added(answer["counted"][name] for answer in answers) for name in answers[0]["counted"]},
        "recent": {
            "seconds": max(span["seconds"] for span in recent),
            "tokens_per_s": sum(span["tokens_per_s"] for span in recent),
            **Sums.of(span["sums"] for span in recent).report(),
        },
    }


@_and_of_each
def capabilities(answers: Sequence[Json]) -> Json:
    """Return the JSON of ``GET /dspark/capabilities``."""
    return _in_common(answers)


@_and_of_each
def switched(answers: Sequence[SwitchedAnswer]) -> Json:
    """Return the JSON of ``POST /dspark/policy``."""
    until_now = [answer["until_now"] for answer in answers]
    return {
        **_in_common([answer["state"] for answer in answers]),
        "until_now": {**added(until_now), "uptime_s": max(counts["uptime_s"] for counts in until_now)},
    }


def _in_common(answers: Sequence[Json]) -> Json:
    """Return the entries that are the same in all answers."""
    first, *others = answers
    return {key: value for key, value in first.items() if all(other[key] == value for other in others)}


def added(counts: Iterable[Mapping[str, float]]) -> dict[str, float]:
    """Return the sum of counts by name."""
    total: dict[str, float] = {}
    for one in counts:
        total |= {name: total.get(name, 0) + number for name, number in one.items()}
    return total
