"""Counts the first drafts of a server, to judge whether the drafter fits."""

from __future__ import annotations

import logging
from collections.abc import Sequence

import torch

from sglang_dspark.calibration.fit import MOST, Fit
from sglang_dspark.step.record import StepRecord

logger = logging.getLogger(__name__)


class FirstDrafts:
    """Counts drafts at position 0 that the drafter proposed and the target verified, up to the verdict that stays.

    The log says once that a drafter does not fit its target.
    """

    def __init__(self) -> None:
        self._warned = False
        self._verified = self._accepted = self._promises = 0
        self._promised = 0.0

    def count(self, record: StepRecord, running: Sequence[int], accepted: Sequence[int]) -> None:
        """Count a step.

        Args:
            record: of the step.
            running: requests of the step that it was meant for.
            accepted: drafts accepted, of these.
        """
        if self._verified >= MOST:
            return
        seen = [
            place for place, request in enumerate(running) if record.verified[request] and not record.copied[request]
        ]
        self._verified += len(seen)
        self._accepted += sum(accepted[place] > 0 for place in seen)
        logits = None if record.confidence is None else record.confidence.logits
        if logits is not None and seen:
            # A broken head's NaN promises nothing.
            promises = torch.sigmoid(logits[[running[place] for place in seen], 0]).nan_to_num(0.0)
            self._promises += len(seen)
            self._promised += float(promises.sum())
        if not self._warned and (warning := self.fit.warning) is not None:
            self._warned = True
            logger.warning("DSPARK: %s", warning)

    @property
    def fit(self) -> Fit:
        """Return whether the drafter fits, as far as the drafts have shown."""
        return Fit(self._verified, self._accepted, self._promised / self._promises if self._promises else None)
