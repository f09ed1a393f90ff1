"""Counts the first drafts of a server, to judge whether the drafter fits."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from sglang_dspark.calibration.fit import MOST, Fit
from sglang_dspark.step.record import StepRecord


class FirstDrafts:
    """Counts drafts at position 0 that the drafter proposed and the target verified, up to the verdict that stays."""

    def __init__(self) -> None:
        self._verified = self._accepted = self._promises = 0
        self._promised = 0.0

    def record(self, rounds: StepRecord, running: Sequence[int], accept_lens: Sequence[int]) -> None:
        """Count a step.

        Args:
            running: requests of the step that it was meant for.
            accept_lens: drafts accepted, of these.
        """
        if self._verified >= MOST:
            return
        seen = [
            place for place, request in enumerate(running) if rounds.verified[request] and not rounds.copied[request]
        ]
        self._verified += len(seen)
        self._accepted += sum(accept_lens[place] > 0 for place in seen)
        logits = None if rounds.confidence is None else rounds.confidence.logits
        if logits is not None and seen:
            # A broken head's NaN promises nothing.
            promises = torch.sigmoid(logits[[running[place] for place in seen], 0]).nan_to_num(0.0)
            self._promises += len(seen)
            self._promised += float(promises.sum())

    @property
    def fit(self) -> Fit:
        """Return whether the drafter fits, as far as the drafts have shown."""
        return Fit(self._verified, self._accepted, self._promised / self._promises if self._promises else None)
