"""Accept length, and whether the drafter fits, by version of the weights."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TypedDict

from sglang_dspark.features.reports.counters import Counters
from sglang_dspark.features.reports.first_drafts import FirstDrafts, fit_of

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
        counters: of all of them together.
        key: of the version in force.
    """

    def __init__(self, counters: Counters, key: Key) -> None:
        self._counters = counters
        self._begin(key, [])

    def change(self, key: Key) -> None:
        """Count for another version from now on, and judge anew whether the drafter fits."""
        self._begin(key, self.counts())

    @property
    def key(self) -> Key:
        """Return that of the version in force."""
        return self._state[1]["key"]

    @property
    def first_drafts(self) -> FirstDrafts:
        """Return those of the version in force."""
        return self._state[2]

    def counts(self) -> list[Count]:
        """Return the counts of each version, the one in force last."""
        ended, before, first_drafts = self._state
        return [*ended, self._since(before, 1, first_drafts)]

    def _begin(self, key: Key, counts: Sequence[Count]) -> None:
        first_drafts = FirstDrafts()
        known: Count = {"key": key, "rounds": 0, "tokens": 0, "first_drafts": first_drafts.counts}
        for count in counts:
            known = count if count["key"] == key else known
        others = [count for count in counts if count["key"] != key]
        # Assigned at once: of two assignments, another thread would see one.
        self._state = others[1 - MOST :], self._since(known, -1, first_drafts), first_drafts

    def _since(self, count: Count, sign: int, first_drafts: FirstDrafts) -> Count:
        """Return a count with those of all versions until now added, or taken off."""
        total = self._counters.sums().total()
        return {
            "key": count["key"],
            "rounds": count["rounds"] + sign * total.rounds,
            "tokens": count["tokens"] + sign * total.committed,
            "first_drafts": first_drafts.counts,
        }


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
