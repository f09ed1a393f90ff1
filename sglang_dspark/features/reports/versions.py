"""Accept length, and whether the drafter fits, by version of the weights."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TypedDict

from sglang_dspark.features.reports.first_drafts import FirstDrafts, fit_of
from sglang_dspark.step.record import StepRecord

MOST = 8
"""Versions that are kept, those that were in force last."""
Key = tuple[str, str]
"""Version of the target's weights, and the drafter's folder."""


class Count(TypedDict):
    """Count what a version has come to, as JSON: rounds, committed tokens, and :attr:`FirstDrafts.counts`."""

    key: Key
    rounds: int
    tokens: int
    first_drafts: Mapping[str, float]


class Versions:
    """Keeps what each version has come to. Other threads may ask.

    Args:
        key: of the version in force.

    Attributes:
        counts: of each version, the one in force last.
        first_drafts: of the version in force.
    """

    counts: Sequence[Count] = ()
    first_drafts: FirstDrafts

    def __init__(self, key: Key) -> None:
        self.change(key)

    def change(self, key: Key) -> None:
        """Count for another version from now on, and judge again whether the drafter fits."""
        self.first_drafts = FirstDrafts()
        known: Count = {"key": key, "rounds": 0, "tokens": 0, "first_drafts": {}}
        known = next((count for count in self.counts if count["key"] == key), known)
        others = [count for count in self.counts if count["key"] != key]
        self.counts = [*others[1 - MOST :], {**known, "first_drafts": self.first_drafts.counts}]

    @property
    def key(self) -> Key:
        """Return that of the version in force."""
        return self.counts[-1]["key"]

    def count(self, record: StepRecord, running: Sequence[int], accepted: Sequence[int]) -> None:
        """Count a step, as :meth:`FirstDrafts.count` takes it."""
        self.counts[-1]["rounds"] += len(running)
        self.counts[-1]["tokens"] += len(running) + sum(accepted)
        self.first_drafts.count(record, running, accepted)


def report(counted: Iterable[Sequence[Count]]) -> list[dict[str, object]]:
    """Return JSON of the counts of several schedulers, which have had the same versions."""
    of_versions: dict[Key, list[Count]] = {}
    for counts in counted:
        for count in counts:
            version, drafter = count["key"]  # a list, as JSON brings it
            of_versions.setdefault((version, drafter), []).append(count)
    return [{"weight_version": key[0], "drafter": key[1], **_summed(counts)} for key, counts in of_versions.items()]


def _summed(counts: Sequence[Count]) -> dict[str, object]:
    rounds, tokens = sum(count["rounds"] for count in counts), sum(count["tokens"] for count in counts)
    fit = fit_of(*(count["first_drafts"] for count in counts))
    return {"rounds": rounds, "accept_length": tokens / rounds if rounds else None, "drafter_fit": str(fit.verdict)}
