"""Make one JSON document of the answers of all replicas: each has a scheduler, which counts and decides on its own."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TypedDict, TypeVar

from sglang_dspark.features.reports import versions
from sglang_dspark.features.reports.counters import Sums, SumsLists

Json = dict[str, object]
A = TypeVar("A")


class StatsAnswer(TypedDict):
    """The answer of a scheduler that is asked for its statistics."""

    uptime_s: float
    state: Json
    versions: Sequence[versions.Count]
    sums: SumsLists
    counted: dict[str, dict[str, float]]


def with_each(report: Callable[[Sequence[A]], Json], answers: Sequence[A]) -> Json:
    """Return a report of all answers, with that of each under ``replicas`` if there are several."""
    each: Json = {"replicas": [report([answer]) for answer in answers]} if len(answers) > 1 else {}
    return report(answers) | each


def stats(answers: Sequence[StatsAnswer]) -> Json:
    """Return the JSON of ``GET /dspark/stats``: counts are added up, and figures made of the sums.

    Of the state of several schedulers it has what is the same in all of them.
    """
    return {
        "uptime_s": max(answer["uptime_s"] for answer in answers),
        **in_common([answer["state"] for answer in answers]),
        "weight_versions": versions.report(answer["versions"] for answer in answers),
        "drafter_fit": versions.fit_of(*(answer["versions"][-1]["first_drafts"] for answer in answers)).report(),
        **Sums.of(answer["sums"] for answer in answers).report(),
        **{name: added(answer["counted"][name] for answer in answers) for name in answers[0]["counted"]},
    }


def in_common(answers: Sequence[Json]) -> Json:
    """Return the entries that are the same in all answers."""
    first, *others = answers
    return {key: value for key, value in first.items() if all(other[key] == value for other in others)}


def added(counts: Iterable[Mapping[str, float]]) -> dict[str, float]:
    """Return the sum of counts by name."""
    total: dict[str, float] = {}
    for one in counts:
        total |= {name: total.get(name, 0) + number for name, number in one.items()}
    return total
