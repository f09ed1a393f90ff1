"""Measure how well predicted probabilities fit the outcomes.

The definitions are those of DeepSpec's evaluator (confidence metrics of ``eval.py``), so that numbers compare.
"""

from dataclasses import dataclass

import numpy as np

from sglang_dspark.calibration.survival import Bools, Floats

ECE_BINS = 20
AUC_BINS = 1000


@dataclass(frozen=True)
class Errors:
    """Compare predictions with outcomes; ``auc`` is None when all or none came true."""

    ece: float
    ece_noise: float
    auc: float | None
    brier: float


def errors(predicted: Floats, observed: Bools) -> Errors:
    """Return the errors of predictions [n], n >= 1, whose outcomes are ``observed`` [n]."""
    ece, noise = ece_and_noise(predicted, observed)
    return Errors(ece, noise, auc(predicted, observed), brier(predicted, observed))


def ece_and_noise(predicted: Floats, observed: Bools) -> tuple[float, float]:
    """Return the expected calibration error of predictions [n], n >= 1, and about that of perfect ones.

    The error is ``sum_b n_b / n |predicted_b - observed_b|`` over 20 bins of [0, 1] (Naeini et al. 2015): ``floor(p *
    20)``, 1 into the last. The mean of a bin's ``n_b`` coins of probability ``p_b`` is off by ``sqrt(2 p_b (1 - p_b) /
    (pi n_b))`` on average (normal approximation).
    """
    bins = _bin(predicted, ECE_BINS)
    counts = np.bincount(bins, minlength=ECE_BINS)
    totals, events = (np.bincount(bins, weights=values, minlength=ECE_BINS) for values in (predicted, observed))
    means = totals / np.maximum(counts, 1)
    spread = np.sqrt(2.0 / np.pi * counts * means * (1.0 - means))
    return float(np.abs(totals - events).sum() / counts.sum()), float(spread.sum() / counts.sum())


def ece(predicted: Floats, observed: Bools) -> float:
    """Return the expected calibration error of predictions [n], n >= 1."""
    return ece_and_noise(predicted, observed)[0]


def brier(predicted: Floats, observed: Bools) -> float:
    """Return the mean squared error of predictions [n], n >= 1."""
    return float(np.mean(np.square(predicted - observed)))


def auc(predicted: Floats, observed: Bools) -> float | None:
    """Return the area under the ROC curve of predictions [n], by a histogram of 1000 bins, ties with half credit.

    That is the probability that an event that happened was given more than one that did not. None when all or none
    happened.
    """
    bins = _bin(predicted, AUC_BINS)
    happened = np.bincount(bins[observed], minlength=AUC_BINS).astype(np.float64)
    other = np.bincount(bins[~observed], minlength=AUC_BINS).astype(np.float64)
    pairs = happened.sum() * other.sum()
    if pairs == 0:
        return None
    other_below = np.cumsum(other) - other
    return float(happened @ (other_below + 0.5 * other) / pairs)


def _bin(predicted: Floats, num_bins: int) -> np.ndarray[tuple[int, ...], np.dtype[np.int64]]:
    return np.clip((predicted * num_bins).astype(np.int64), 0, num_bins - 1)
