"""What a calibration is worth on rounds that it was not fitted to."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Self

from sglang_dspark.calibration.logistic import LogisticMap
from sglang_dspark.calibration.metrics import auc, brier, reliability_bins
from sglang_dspark.calibration.survival import Bools, Floats, prefix_survival, sigmoid, survived
from sglang_dspark.tools.calibrate.traces import BlockRounds


@dataclass(frozen=True)
class PositionErrors:
    """Prefix survival at one position; ``before`` is the raw head, ``after`` with temperatures.

    Attributes:
        pairs: rounds that put this draft to the test, all drafts before it being accepted.
        ece_shifted: with a scale and a shift per position, the form of a server's online calibration.
        ece_noise: about the ECE of perfect predictions on as many rounds.
        auc: of the calibrated survival; None when all or none survived.
    """

    pairs: int
    ece_before: float
    ece_after: float
    ece_shifted: float
    ece_noise: float
    auc: float | None
    brier_before: float
    brier_after: float


@dataclass(frozen=True)
class HeldOut:
    """Predicted and observed prefix survival of rounds, each [n, gamma]."""

    before: Floats
    after: Floats
    shifted: Floats
    outcomes: Bools

    @classmethod
    def measure(cls, rounds: BlockRounds, temperatures: Floats, shifted: LogisticMap) -> Self:
        """Predict with the raw head, with temperatures [gamma], and with a scale and a shift per position."""
        logits = (rounds.logits, rounds.logits / temperatures, shifted(rounds.logits))
        before, after, with_shifts = (prefix_survival(sigmoid(z)) for z in logits)
        return cls(before, after, with_shifts, survived(rounds.accepted, len(temperatures)))

    def positions(self) -> list[PositionErrors]:
        """Errors by position, first draft first."""
        pairs = [len(self.outcomes), *self.outcomes.sum(axis=0)[:-1].tolist()]
        columns = zip(pairs, self.before.T, self.after.T, self.shifted.T, self.outcomes.T, strict=True)
        return [_errors(*column) for column in columns]


def _errors(pairs: int, before: Floats, after: Floats, shifted: Floats, outcomes: Bools) -> PositionErrors:
    bins = reliability_bins(after, outcomes)
    return PositionErrors(
        pairs=pairs,
        ece_before=reliability_bins(before, outcomes).ece,
        ece_after=bins.ece,
        ece_shifted=reliability_bins(shifted, outcomes).ece,
        ece_noise=bins.ece_noise,
        auc=auc(after, outcomes),
        brier_before=brier(before, outcomes),
        brier_after=brier(after, outcomes),
    )
