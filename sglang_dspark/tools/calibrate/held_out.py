"""Evaluate a calibration on rounds that it was not fitted to."""

from __future__ import annotations

from dataclasses import dataclass

from sglang_dspark.calibration.logistic import LogisticMap
from sglang_dspark.calibration.metrics import auc, brier, reliability_bins
from sglang_dspark.calibration.survival import Bools, Floats, prefix_survival, sigmoid, survived
from sglang_dspark.tools.calibrate.traces import BlockRounds


@dataclass(frozen=True)
class PositionErrors:
    """Errors of prefix survival at one position; ``before`` is the raw head, ``after`` with temperatures.

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


def held_out_errors(rounds: BlockRounds, temperatures: Floats, shifted: LogisticMap) -> list[PositionErrors]:
    """Return the errors by position, first draft first.

    Args:
        temperatures: [gamma].
        shifted: a scale and a shift per position.
    """
    logits = (rounds.logits, rounds.logits / temperatures, shifted(rounds.logits))
    predicted = [prefix_survival(sigmoid(z)).T for z in logits]
    outcomes = survived(rounds.accepted, len(temperatures))
    pairs = [len(outcomes), *outcomes.sum(axis=0)[:-1].tolist()]
    return [_errors(*column) for column in zip(pairs, *predicted, outcomes.T, strict=True)]


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
