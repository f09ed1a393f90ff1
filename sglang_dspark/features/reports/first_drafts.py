"""Counts the first drafts of a server, to judge whether the drafter fits."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence

import torch

from sglang_dspark.calibration.fit import MOST, Fit
from sglang_dspark.step.record import StepRecord

logger = logging.getLogger(__name__)

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
        """Count a step.

        Args:
            record: of the step.
            running: requests of the step that it was meant for.
            accepted: drafts accepted, of these.
        """
        if self.counts["verified"] >= MOST:
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
        if not self._warned and (warning := self.fit.warning) is not None:
            self._warned = True
            logger.warning("DSPARK: %s", warning)

    @property
    def fit(self) -> Fit:
        """Return whether the drafter fits, as far as the drafts have shown."""
        return fit_of(self.counts)


def fit_of(*counts: Mapping[str, float]) -> Fit:
    """Return whether the drafter fits, by :attr:`FirstDrafts.counts` of one scheduler or several."""
    verified, accepted, promises, promised = (sum(one[name] for one in counts) for name in _NAMES)
    return Fit(int(verified), int(accepted), promised / promises if promises else None)
