"""Make one answer of those of all replicas: each has a scheduler of its own, which counts and decides by itself."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import wraps
from typing import Any

from sglang_dspark.features.reports import versions
from sglang_dspark.features.reports.first_drafts import fit_of
from sglang_dspark.features.reports.sums import Sums

Answer = Mapping[str, Any]
Report = Callable[[Sequence[Answer]], dict[str, Any]]
"""Returns JSON of the answers of all schedulers, replica 0 first."""


def _and_of_each(report: Report) -> Report:
    """Return a report that has, if there are several replicas, that of each under ``replicas``."""

    @wraps(report)
    def of_all(answers: Sequence[Answer]) -> dict[str, Any]:
        each = {"replicas": [report([answer]) for answer in answers]} if len(answers) > 1 else {}
        return report(answers) | each

    return of_all


@_and_of_each
def stats(answers: Sequence[Answer]) -> dict[str, Any]:
    """Return the JSON of ``GET /dspark/stats``: counts and speeds are added up, and figures made of the sums.

    Of the state of several schedulers it has what is the same in all of them.
    """
    recent = [answer["recent"] for answer in answers]
    return {
        "uptime_s": max(answer["uptime_s"] for answer in answers),
        **_in_common([answer["state"] for answer in answers]),
        "weight_versions": versions.report(answer["versions"] for answer in answers),
        "drafter_fit": fit_of(_added(answer["first_drafts"] for answer in answers)).report(),
        "failed_advice": _added(answer["failed_advice"] for answer in answers),
        "steps_by_policy": _added(answer["steps_by_policy"] for answer in answers),
        **Sums.of(answer["sums"] for answer in answers).report(),
        **{name: _added(answer["of_features"][name] for answer in answers) for name in answers[0]["of_features"]},
        "recent": {
            "seconds": max(span["seconds"] for span in recent),
            "tokens_per_s": sum(span["tokens_per_s"] for span in recent),
            **Sums.of(span["sums"] for span in recent).report(),
        },
    }


@_and_of_each
def capabilities(answers: Sequence[Answer]) -> dict[str, Any]:
    """Return the JSON of ``GET /dspark/capabilities``."""
    return _in_common(answers)


@_and_of_each
def switched(answers: Sequence[Answer]) -> dict[str, Any]:
    """Return the JSON of ``POST /dspark/policy``."""
    until_now = [answer["until_now"] for answer in answers]
    return {
        **_in_common([answer["state"] for answer in answers]),
        "until_now": {**_added(until_now), "uptime_s": max(counts["uptime_s"] for counts in until_now)},
    }


def _in_common(answers: Sequence[Answer]) -> dict[str, Any]:
    """Return the entries that are the same in all answers."""
    first, *others = answers
    return {key: value for key, value in first.items() if all(other[key] == value for other in others)}


def _added(counts: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
    total: Counter[str] = Counter()
    for one in counts:
        total.update(one)
    return dict(total)
