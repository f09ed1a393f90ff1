"""What temperatures are worth on rounds that they were not fitted to."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Self

import numpy as np

from sglang_dspark.calibration.metrics import auc, brier, reliability_bins
from sglang_dspark.calibration.survival import Bools, Floats, prefix_survival, sigmoid, survived
from sglang_dspark.calibration.traces import BlockRounds


@dataclass(frozen=True)
class PositionErrors:
    """Prefix survival at one position; ``before`` is the raw head.

    Attributes:
        pairs: rounds that put this draft to the test, all drafts before it being accepted.
        ece_noise: about the ECE of perfect predictions on as many rounds.
        auc: of the calibrated survival; None when all or none survived.
    """

    pairs: int
    ece_before: float
    ece_after: float
    ece_noise: float
    auc: float | None
    brier_before: float
    brier_after: float


@dataclass(frozen=True)
class HeldOut:
    """Predicted and observed prefix survival of rounds, each [n, gamma]."""

    before: Floats
    after: Floats
    outcomes: Bools

    @classmethod
    def measure(cls, rounds: BlockRounds, temperatures: Floats) -> Self:
        """Predict with temperatures [gamma], and without."""
        before, after = (
            prefix_survival(sigmoid(rounds.logits / t)) for t in (np.ones_like(temperatures), temperatures)
        )
        return cls(before, after, survived(rounds.accepted, len(temperatures)))

    def positions(self) -> list[PositionErrors]:
        """Errors by position, first draft first."""
        pairs = [len(self.outcomes), *self.outcomes.sum(axis=0)[:-1].tolist()]
        columns = zip(pairs, self.before.T, self.after.T, self.outcomes.T, strict=True)
        return [_errors(*column) for column in columns]


def _errors(pairs: int, before: Floats, after: Floats, outcomes: Bools) -> PositionErrors:
    bins = reliability_bins(after, outcomes)
    return PositionErrors(
        pairs=pairs,
        ece_before=reliability_bins(before, outcomes).ece,
        ece_after=bins.ece,
        ece_noise=bins.ece_noise,
        auc=auc(after, outcomes),
        brier_before=brier(before, outcomes),
        brier_after=brier(after, outcomes),
    )
