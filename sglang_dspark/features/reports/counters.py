"""Counters of decode steps, and the figures that follow from them. Fed from results that SGLang copies to the host.

Everything reported is a function of sums, which replicas add up. Accept length, and whether the drafter fits, are
counted by version of the weights.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Self, TypedDict

import numpy as np
import torch
from numpy.typing import NDArray

from sglang_dspark.scheduling.online_calibration import FIT_MOST, DrafterFit, PredictedSurvival
from sglang_dspark.step.decision import StepRecord, TimedStep

logger = logging.getLogger(__name__)

STEPS, PLAIN_STEPS, PARKED_STEPS, DRAFTED, TIMED_STEPS, MEASURED_MS, PREDICTED_MS = range(7)
COPIED, COPIED_ACCEPTED, COPYING_ROUNDS, COPYING_VERIFIED, COPYING_ACCEPTED = range(7, 12)
TEXT, CACHE = (12, 13, 14), (15, 16, 17)  # proposed, verified, accepted
THINKING_ROUNDS, THINKING_ACCEPTED, UNPROPOSED, NUM_SCALARS = range(18, 22)
"""Columns of :attr:`Sums.loads` before those that count rounds by outcome."""
NUM_LOADS = 16
SumsLists = dict[str, list[list[float]]]
"""The attributes of :class:`Sums` as JSON."""


def load_of(requests: int) -> int:
    """Return the row of :attr:`Sums.loads` for a step of so many requests: 1, 2, 3-4, 5-8, 9-16 and so on."""
    return min((requests - 1).bit_length(), NUM_LOADS - 1)


def requests_of(load: int) -> tuple[int, int]:
    """Return the fewest and the most requests of a row of :attr:`Sums.loads`."""
    return (1 << load - 1) + 1 if load else 1, 1 << load


@dataclass(frozen=True)
class Sums:
    """Sums over decode steps; a round is one request in one step.

    Attributes:
        loads: [NUM_LOADS, NUM_SCALARS + 3 * (gamma + 1)], by the number of requests in the step. After the scalars,
            the number of rounds by drafts verified, by drafts accepted, and once more by drafts accepted, of the rounds
            that rejected one; without the rounds in which a preset copied, which say nothing about the drafter.
        predicted: [3, n], by position in the block, over the verified drafts whose survival was predicted: their
            number, the sum of the predictions, and how many survived. n is at most gamma.
    """

    loads: NDArray[np.float64]
    predicted: NDArray[np.float64]

    @classmethod
    def of(cls, listed: Iterable[SumsLists]) -> Self:
        """Return the sum of what :meth:`lists` has returned, of one scheduler or several."""
        loads, predicted = zip(*((one["loads"], one["predicted"]) for one in listed), strict=True)
        return cls(np.sum(loads, 0), np.sum(predicted, 0))

    def lists(self) -> SumsLists:
        """Return both arrays as JSON."""
        return {"loads": self.loads.tolist(), "predicted": self.predicted.tolist()}

    def total(self) -> Figures:
        """Return the sums over all loads."""
        return Figures(self.loads.sum(0), self.predicted)

    def by_load(self) -> Iterator[tuple[int, Figures]]:
        """Yield the rows of loads that occurred, and their figures."""
        for load, row in enumerate(self.loads):
            if row[STEPS] or row[TIMED_STEPS]:
                yield load, Figures(row)

    def report(self) -> dict[str, object]:
        """Return as JSON counts, means, figures by position and by number of requests."""
        total = self.total()
        by_load = [
            {"requests": list(requests_of(load)), **figures.counts(), **figures.means()}
            for load, figures in self.by_load()
        ]
        return {**total.counts(), **total.means(), **total.by_position(), "by_load": by_load}


class Figures:
    """The figures that follow from one row of sums.

    Args:
        row: of :attr:`Sums.loads`, or a sum of rows.
        predicted: :attr:`Sums.predicted`; the figures by position need it.
    """

    def __init__(self, row: NDArray[np.float64], predicted: NDArray[np.float64] | None = None) -> None:
        self._row, self._predicted = row, predicted
        self._verified, self._accepted, self._rejected = row[NUM_SCALARS:].reshape(3, -1)
        self.gamma = len(self._verified) - 1
        lengths = np.arange(self.gamma + 1)
        self.steps = int(row[STEPS])
        self.rounds = int(self._verified.sum() + row[COPYING_ROUNDS])
        self.verified = int(self._verified @ lengths + row[COPYING_VERIFIED])
        self.accepted = int(self._accepted @ lengths + row[COPYING_ACCEPTED])
        self.committed = self.accepted + self.rounds  # one correction or bonus token per round
        self.measured_ms, self.predicted_ms = row[[MEASURED_MS, PREDICTED_MS]].tolist()

    def counts(self) -> dict[str, int]:
        """Return as JSON the numbers of steps, rounds and tokens."""
        return {
            "steps": self.steps,
            "plain_steps": int(self._row[PLAIN_STEPS]),
            "parked_steps": int(self._row[PARKED_STEPS]),
            "rounds": self.rounds,
            "drafted_tokens": int(self._row[DRAFTED]),
            "copied_tokens": int(self._row[COPIED]),
            "copied_accepted_tokens": int(self._row[COPIED_ACCEPTED]),
            **{
                f"{source}_{what}_tokens": int(self._row[column])
                for source, columns in (("text", TEXT), ("cache", CACHE))
                for what, column in zip(("proposed", "verified", "accepted"), columns, strict=True)
            },
            "thinking_rounds": int(self._row[THINKING_ROUNDS]),
            "verified_tokens": self.verified,
            "accepted_tokens": self.accepted,
            "committed_tokens": self.committed,
            "unproposed_tokens": int(self._row[UNPROPOSED]),
            "timed_steps": int(self._row[TIMED_STEPS]),
        }

    def means(self) -> dict[str, float | None]:
        """Return as JSON ratios of the counts, and mean step times; None if nothing was counted.

        ``wasted_verify_fraction`` is (k - (tau - 1)) / k with k drafts verified per round and accept length tau.
        """
        row, timed = self._row, self._row[TIMED_STEPS]
        thinking, thinking_accepted = row[THINKING_ROUNDS], row[THINKING_ACCEPTED]
        answering = self.rounds - thinking
        return {
            "accept_length": ratio(self.committed, self.rounds),
            "thinking_accept_length": ratio(thinking + thinking_accepted, thinking),
            "answer_accept_length": ratio(answering + self.accepted - thinking_accepted, answering),
            "verify_length": ratio(self.verified, self.rounds),
            "wasted_verify_fraction": ratio(self.verified - self.accepted, self.verified),
            "running_requests": ratio(self.rounds, self.steps),
            "measured_step_ms": ratio(self.measured_ms, timed),
            # A server without a table of step times predicts none.
            "predicted_step_ms": ratio(self.predicted_ms, timed) if self.predicted_ms else None,
        }

    def positions(self) -> NDArray[np.float64]:
        """Return [3, gamma] the drafter's drafts by position: verified, with all before them accepted, accepted."""
        verified = self._verified[:0:-1].cumsum()[::-1]
        accepted = self._accepted[:0:-1].cumsum()[::-1]
        # A draft was put to the test if those before it were accepted: at the first rejected one, the test was lost.
        return np.stack([verified, accepted + self._rejected[:-1], accepted])

    def by_position(self) -> dict[str, list[float | None]]:
        """Return as JSON the figures by position that docs/statistics.md describes, position 0 first."""
        assert self._predicted is not None
        verified, tested, accepted = self.positions().tolist()
        drafts, predicted, survived = self._predicted.tolist()
        unknown = [None] * (self.gamma - len(drafts))
        errors = [ratio(p - s, n) for p, s, n in zip(predicted, survived, drafts, strict=True)]
        return {
            "survival": [ratio(a, v) for a, v in zip(accepted, verified, strict=True)],
            "conditional_acceptance": [ratio(a, t) for a, t in zip(accepted, tested, strict=True)],
            "predicted_survival": [ratio(p, n) for p, n in zip(predicted, drafts, strict=True)] + unknown,
            "calibration_error": errors + unknown,
        }


def ratio(part: float, whole: float) -> float | None:
    """Return a share or a mean; None of nothing."""
    return float(part / whole) if whole else None


class Counters:
    """Collects :class:`Sums`. A step costs a few list entries and one per request, whatever is reported of them.

    Args:
        gamma: drafts per block.
        predicted: sums over predicted survivals, kept by the forecast; None without one.

    Attributes:
        steps_by_policy: decode steps by the policy that chose them.
    """

    def __init__(self, gamma: int, predicted: PredictedSurvival | None = None) -> None:
        self._width = gamma + 1
        self._predicted = predicted or PredictedSurvival(gamma)
        # Lists: adding to one entry of an array takes three times as long.
        self._loads = [[0.0] * (NUM_SCALARS + 3 * self._width) for _ in range(NUM_LOADS)]
        self.steps_by_policy: Counter[str] = Counter()

    def record(
        self,
        draft_lens: Sequence[int],
        verify_lens: Sequence[int],
        accept_lens: Sequence[int],
        leading: Sequence[Sequence[int]] = (),
        *,
        policy: str,
        parked: bool = False,
        thoughts: Sequence[int] = (),
        unproposed: int = 0,
    ) -> None:
        """Add one step.

        Args:
            draft_lens: drafts that the drafter proposed per request.
            verify_lens: drafts verified per request.
            accept_lens: drafts accepted per request (bonus not included).
            leading: leading drafts per request that a preset copied, that go on with a chain of its own text, and with
                one of an earlier answer; empty for none.
            policy: name of the policy that chose the step.
            parked: whether speculation rested when the step was chosen.
            thoughts: drafts accepted by the requests that reason and have not begun to answer.
            unproposed: committed tokens that the drafter cannot propose.
        """
        row, width = self._loads[load_of(len(verify_lens))], self._width
        by_verified, by_accepted, by_rejected = range(NUM_SCALARS, NUM_SCALARS + 3 * width, width)
        drafted, (copied, *followed_by_source) = sum(draft_lens), leading or ((), (), ())
        row[STEPS] += 1
        plain = not (drafted or any(copied))
        row[PLAIN_STEPS] += plain
        row[PARKED_STEPS] += parked
        row[DRAFTED] += drafted
        row[UNPROPOSED] += unproposed
        row[THINKING_ROUNDS] += len(thoughts)
        row[THINKING_ACCEPTED] += sum(thoughts)
        self.steps_by_policy[policy] += 1
        if plain:
            row[by_verified] += len(verify_lens)
            row[by_accepted] += len(verify_lens)
            return
        for (of_proposed, of_verified, of_accepted), lens in zip((TEXT, CACHE), followed_by_source, strict=True):
            for followed, verified, accepted in zip(lens, verify_lens, accept_lens, strict=False):
                row[of_proposed] += followed
                row[of_verified] += min(followed, verified)
                row[of_accepted] += min(followed, accepted)
        for request, (verified, accepted) in enumerate(zip(verify_lens, accept_lens, strict=True)):
            if not copied or not copied[request]:
                row[by_verified + verified] += 1
                row[by_accepted + accepted] += 1
                row[by_rejected + accepted] += accepted < verified
                continue
            row[COPIED] += min(copied[request], verified)
            row[COPIED_ACCEPTED] += min(copied[request], accepted)
            row[COPYING_ROUNDS] += 1
            row[COPYING_VERIFIED] += verified
            row[COPYING_ACCEPTED] += accepted

    def record_time(self, timed: TimedStep) -> None:
        """Add the time of one step."""
        row = self._loads[load_of(timed.requests)]
        row[TIMED_STEPS] += 1
        row[MEASURED_MS] += timed.measured_ms
        row[PREDICTED_MS] += timed.expected_ms or 0.0

    def sums(self) -> Sums:
        """Return a copy of all sums up to now."""
        return Sums(np.array(self._loads), self._predicted.sums())


MOST_VERSIONS = 8
"""Versions that are kept, those that were in force last."""
VersionKey = tuple[str, str]
"""Version of the target's weights, and the drafter's folder."""
_NAMES = ("verified", "accepted", "promises", "promised")


def fit_of(*counts: Mapping[str, float]) -> DrafterFit:
    """Return whether the drafter fits, from :attr:`Versions.first_drafts` of one scheduler or several."""
    verified, accepted, promises, promised = (sum(one[name] for one in counts) for name in _NAMES)
    return DrafterFit(int(verified), int(accepted), ratio(promised, promises))


class Count(TypedDict):
    """Count what a version has come to, as JSON: rounds, committed tokens, and :attr:`Versions.first_drafts`."""

    key: VersionKey
    rounds: int
    tokens: int
    first_drafts: Mapping[str, float]


class Versions:
    """Keeps what each version has come to. Other threads may ask.

    First drafts are drafts at position 0 that the drafter proposed and the target verified, up to the verdict that
    stays. The log says once that a drafter does not fit its target.

    Args:
        key: of the version in force.

    Attributes:
        counts: of each version, the one in force last.
        first_drafts: of the version in force, JSON: how many were ``verified`` and ``accepted``, for how many the head
            made ``promises``, and the sum of the probabilities ``promised``.
    """

    counts: Sequence[Count] = ()
    first_drafts: dict[str, float]

    def __init__(self, key: VersionKey) -> None:
        self.change(key)

    def change(self, key: VersionKey) -> None:
        """Count for another version from now on, and judge again whether the drafter fits."""
        self._warned, self.first_drafts = False, dict.fromkeys(_NAMES, 0.0)
        known: Count = {"key": key, "rounds": 0, "tokens": 0, "first_drafts": {}}
        known = next((count for count in self.counts if count["key"] == key), known)
        others = [count for count in self.counts if count["key"] != key]
        self.counts = [*others[1 - MOST_VERSIONS :], {**known, "first_drafts": self.first_drafts}]

    def count(self, record: StepRecord, running: Sequence[int], accepted: Sequence[int]) -> None:
        """Count a step, as :meth:`~sglang_dspark.engine.part.Part.step_done` has it."""
        self.counts[-1]["rounds"] += len(running)
        self.counts[-1]["tokens"] += len(running) + sum(accepted)
        drafts = self.first_drafts
        if drafts["verified"] >= FIT_MOST:
            return
        seen = [
            place
            for place, request in enumerate(running)
            if record.verified[request] and not record.from_request[request]
        ]
        drafts["verified"] += len(seen)
        drafts["accepted"] += sum([accepted[place] > 0 for place in seen])
        logits = None if record.confidence is None else record.confidence.logits
        if logits is not None and seen:
            # A broken head's NaN promises nothing.
            promises = torch.sigmoid(logits[[running[place] for place in seen], 0]).nan_to_num(0.0)
            drafts["promises"] += len(seen)
            drafts["promised"] += float(promises.sum())
        if not self._warned and (warning := fit_of(drafts).warning) is not None:
            self._warned = True
            logger.warning("DSPARK: %s", warning)


def report_versions(counted: Iterable[Sequence[Count]]) -> list[dict[str, object]]:
    """Return JSON of the counts of several schedulers, which have had the same versions."""
    of_versions: dict[VersionKey, list[Count]] = {}
    for counts in counted:
        for count in counts:
            version, drafter = count["key"]  # a list, as JSON brings it
            of_versions.setdefault((version, drafter), []).append(count)
    return [{"weight_version": key[0], "drafter": key[1], **_summed(counts)} for key, counts in of_versions.items()]


def _summed(counts: Sequence[Count]) -> dict[str, object]:
    rounds, tokens = sum(count["rounds"] for count in counts), sum(count["tokens"] for count in counts)
    fit = fit_of(*(count["first_drafts"] for count in counts))
    return {"rounds": rounds, "accept_length": ratio(tokens, rounds), "drafter_fit": str(fit.verdict)}
