"""Counters of decode steps. Pure host code, fed from results that SGLang copies to the host anyway."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import numpy as np

from sglang_dspark.calibration.predicted_survival import PredictedSurvival
from sglang_dspark.features.reports.sums import (
    CACHE,
    COPIED,
    COPIED_ACCEPTED,
    COPYING_ACCEPTED,
    COPYING_ROUNDS,
    COPYING_VERIFIED,
    DRAFTED,
    MEASURED_MS,
    NUM_LOADS,
    NUM_SCALARS,
    PARKED_STEPS,
    PLAIN_STEPS,
    PREDICTED_MS,
    STEPS,
    TEXT,
    THINKING_ACCEPTED,
    THINKING_ROUNDS,
    TIMED_STEPS,
    UNPROPOSED,
    Sums,
    load_of,
)
from sglang_dspark.step.record import TimedStep


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
        copied_lens: Sequence[int] | None = None,
        followed_lens: Sequence[int] | None = None,
        cached_lens: Sequence[int] | None = None,
        *,
        policy: str,
        parked: bool = False,
    ) -> None:
        """Add one step.

        Args:
            draft_lens: drafts that the drafter proposed per request.
            verify_lens: drafts verified per request.
            accept_lens: drafts accepted per request (bonus not included).
            policy: name of the policy that chose the step.
            parked: whether speculation rested when the step was chosen.
            copied_lens: leading drafts per request that a preset copied; None for none.
            followed_lens: leading drafts per request that go on with a chain of its own text; None for none.
            cached_lens: the same of earlier answers.
        """
        row, width = self._loads[load_of(len(verify_lens))], self._width
        by_verified, by_accepted, by_rejected = range(NUM_SCALARS, NUM_SCALARS + 3 * width, width)
        drafted = sum(draft_lens)
        row[STEPS] += 1
        plain = not (drafted or any(copied_lens or ()))
        row[PLAIN_STEPS] += plain
        row[PARKED_STEPS] += parked
        row[DRAFTED] += drafted
        self.steps_by_policy[policy] += 1
        if plain:
            row[by_verified] += len(verify_lens)
            row[by_accepted] += len(verify_lens)
            return
        for (of_proposed, of_verified, of_accepted), lens in ((TEXT, followed_lens), (CACHE, cached_lens)):
            for followed, verified, accepted in zip(lens or (), verify_lens, accept_lens, strict=False):
                row[of_proposed] += followed
                row[of_verified] += min(followed, verified)
                row[of_accepted] += min(followed, accepted)
        for request, (verified, accepted) in enumerate(zip(verify_lens, accept_lens, strict=True)):
            if copied_lens is None or not copied_lens[request]:
                row[by_verified + verified] += 1
                row[by_accepted + accepted] += 1
                row[by_rejected + accepted] += accepted < verified
                continue
            row[COPIED] += min(copied_lens[request], verified)
            row[COPIED_ACCEPTED] += min(copied_lens[request], accepted)
            row[COPYING_ROUNDS] += 1
            row[COPYING_VERIFIED] += verified
            row[COPYING_ACCEPTED] += accepted

    def record_tokens(self, requests: int, *, thoughts: Sequence[int], unproposed: int) -> None:
        """Add what the tokens of a step of so many requests were.

        Args:
            thoughts: drafts accepted by the requests that reason and have not begun to answer.
            unproposed: tokens that the drafter cannot propose.
        """
        row = self._loads[load_of(requests)]
        row[UNPROPOSED] += unproposed
        row[THINKING_ROUNDS] += len(thoughts)
        row[THINKING_ACCEPTED] += sum(thoughts)

    def record_time(self, timed: TimedStep) -> None:
        """Add the time of one step."""
        row = self._loads[load_of(timed.requests)]
        row[TIMED_STEPS] += 1
        row[MEASURED_MS] += timed.measured_ms
        row[PREDICTED_MS] += timed.expected_ms or 0.0

    def sums(self) -> Sums:
        """Return a copy of all sums up to now."""
        return Sums(np.array(self._loads), self._predicted.sums())

    def __str__(self) -> str:
        total = self.sums().total()
        counts, length = total.counts(), total.accept_length
        return (
            f"drafted {counts['drafted_tokens']}, verified {total.verified}, accepted {total.accepted}, "
            f"committed {total.committed}, accept length {'-' if length is None else format(length, '.2f')}"
        )
