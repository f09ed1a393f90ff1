"""Accept length, and whether the drafter fits, by version of the weights."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping, Sequence
from typing import TypedDict

import torch

from sglang_dspark.calibration.online import MOST as MOST_DRAFTS
from sglang_dspark.calibration.online import Fit
from sglang_dspark.features.reports.counters import ratio
from sglang_dspark.step.record import StepRecord

logger = logging.getLogger(__name__)

MOST = 8
"""Versions that are kept, those that were in force last."""
Key = tuple[str, str]
"""Version of the target's weights, and the drafter's folder."""
_NAMES = ("verified", "accepted", "promises", "promised")


class FirstDrafts:
    """Counts drafts at position 0 that the drafter proposed and the target verified, up to the verdict that stays.

    The log says once that a drafter does not fit its target.

    Attributes:
        counts: JSON: how many were ``verified`` and ``accepted``, for how many the head made ``promises``, and the sum
            of the probabilities ``promised``.
    """

    def __init__(self) -> None:
        self._warned = False
        self.counts = dict.fromkeys(_NAMES, 0.0)

    def count(self, record: StepRecord, running: Sequence[int], accepted: Sequence[int]) -> None:
        """Count a step, as :meth:`~sglang_dspark.engine.feature.Part.step_done` has it."""
        if self.counts["verified"] >= MOST_DRAFTS:
            return
        seen = [
            place for place, request in enumerate(running) if record.verified[request] and not record.copied[request]
        ]
        self.counts["verified"] += len(seen)
        self.counts["accepted"] += sum([accepted[place] > 0 for place in seen])
        logits = None if record.confidence is None else record.confidence.logits
        if logits is not None and seen:
            # A broken head's NaN promises nothing.
            promises = torch.sigmoid(logits[[running[place] for place in seen], 0]).nan_to_num(0.0)
            self.counts["promises"] += len(seen)
            self.counts["promised"] += float(promises.sum())
        if not self._warned and (warning := fit_of(self.counts).warning) is not None:
            self._warned = True
            logger.warning("DSPARK: %s", warning)


def fit_of(*counts: Mapping[str, float]) -> Fit:
    """Return whether the drafter fits, by :attr:`FirstDrafts.counts` of one scheduler or several."""
    verified, accepted, promises, promised = (sum(one[name] for one in counts) for name in _NAMES)
    return Fit(int(verified), int(accepted), ratio(promised, promises))


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
    return {"rounds": rounds, "accept_length": ratio(tokens, rounds), "drafter_fit": str(fit.verdict)}
