"""From confidence logits to calibrated probabilities: Sequential Temperature Scaling, and how well it fits.

Sequential Temperature Scaling (paper 3.2.1) and the file that holds its result.

The file is a JSON object::

    {
      "version": 1,
      "temperatures": [1.23, 1.10, ...],     gamma numbers: c_k = sigmoid(z_k / T_k)
      "target": "Qwen3-8B",                  the pair that it was measured on; may be left out
      "draft": "dspark_qwen3_8b_block7",
      "dataset": "alpaca.jsonl",             the rest is for the reader: prompts, rounds that were fitted,
      "num_samples": 12345,                  and ECE by position before and after, on rounds that were not
      "ece_before": [0.057, ...],
      "ece_after": [0.020, ...]
    }

All keys but ``version``, ``target`` and ``draft`` are also those of the DSPARK built into later versions of SGLang.

Letters: ``n`` rounds, ``gamma`` drafts per round, ``z`` raw logit of the confidence head, ``c`` conditional acceptance
probability of a draft, ``a`` prefix survival, the product of the ``c`` so far. Drafts count from 0 in arrays and from 1
in what is printed.

The definitions of fit are those of DeepSpec's evaluator (confidence metrics of ``eval.py``), so that numbers compare.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Self

import msgspec
import numpy as np
import numpy.typing as npt
from msgspec import Meta

from sglang_dspark.errors import ConfigError
from sglang_dspark.files import atomic_write
from sglang_dspark.hub import checkpoint_name

Floats = npt.NDArray[np.floating[Any]]
Ints = npt.NDArray[np.integer[Any]]
Bools = npt.NDArray[np.bool_]


def sigmoid(x: npt.ArrayLike) -> Floats:
    """Return the logistic function of any shape, float64; through tanh, which does not overflow."""
    return 0.5 + 0.5 * np.tanh(0.5 * np.asarray(x, dtype=np.float64))


def prefix_survival(conditional: Floats) -> Floats:
    """Return [n, gamma] survivals, ``a_k = prod_{i <= k} c_i``, of conditional acceptances [n, gamma] (paper 3.2.1)."""
    return np.cumprod(conditional, axis=1)


def survived(accepted: Ints, gamma: int) -> Bools:
    """Return whether the draft and all before it were accepted: [n, gamma] of accepted counts [n]."""
    return np.asarray(accepted)[:, None] > np.arange(gamma)


def reached(verified: Ints, accepted: Ints, gamma: int) -> Bools:
    """Return [n, gamma] whether a draft was put to the test: one of [n] verified, and nothing before it rejected."""
    return np.minimum(verified, np.asarray(accepted) + 1)[:, None] > np.arange(gamma)


SCALE_BOUNDS = (0.05, 20.0)
"""Positive, so that a position keeps its order of confidence. Temperatures from 20 to 1/20: beyond, a head is as
good as constant or a step."""
SHIFT_BOUNDS = (-10.0, 10.0)
"""sigmoid(10) is 5e-5 away from 1, less than a window of 1000 outcomes can show."""
SCALE_PRECISION = 1.0
SHIFT_PRECISION = 0.25
"""Ridge: a priori, scale is within 1 of its start and shift within 2 of 0 (standard deviations). An outcome at
probability 0.8 adds 0.16 to the shift's precision, so a dozen outweigh it; a window without contrast stays finite."""


@dataclass(frozen=True)
class LogisticMap:
    """``c_k = sigmoid(scale_k * z_k + shift_k)``; both arrays [gamma] float64."""

    scale: Floats
    shift: Floats

    def __call__(self, logits: Floats) -> Floats:
        """Return the logits of the conditional acceptance for logits [..., gamma], in the same shape."""
        return self.scale * logits + self.shift

    def refined(
        self, start_scale: Floats, logits: Floats, outcomes: Floats, filled: npt.NDArray[Any], steps: int
    ) -> LogisticMap:
        """Return the map after some more steps towards the best fit to a window.

        A step is Newton's with the curvature ``p (1 - p)`` of an outcome replaced by its upper bound ``tanh(|x| / 2) /
        (2 |x|)`` at ``x = scale z + shift`` (Jaakkola and Jordan 2000). The penalised likelihood is concave and grows
        with every such step, from any start and on separable data, where plain Newton steps overshoot.

        Args:
            start_scale: [gamma] what the ridge pulls the scale to; the shift is pulled to 0.
            logits: [gamma, w]
            outcomes: [gamma, w] 0 or 1
            filled: [gamma] entries of a row that count, from its start.
        """
        weight = (np.arange(logits.shape[1]) < filled[:, None]).astype(np.float64)
        residual = weight * (outcomes - 0.5)
        pull_scale = (residual * logits).sum(axis=1) + SCALE_PRECISION * start_scale
        pull_shift = residual.sum(axis=1)
        scale, shift = self.scale, self.shift
        for _ in range(steps):
            # tanh(x / 2) / (2 x) tends to 1/4 at 0, where the quotient cannot be formed.
            x = np.maximum(np.abs(scale[:, None] * logits + shift[:, None]), 1e-6)
            curvature = weight * np.tanh(0.5 * x) / (2.0 * x)
            weighted = curvature * logits
            scale_scale = (weighted * logits).sum(axis=1) + SCALE_PRECISION
            scale_shift = weighted.sum(axis=1)
            shift_shift = curvature.sum(axis=1) + SHIFT_PRECISION
            determinant = scale_scale * shift_shift - scale_shift**2
            scale = np.clip((shift_shift * pull_scale - scale_shift * pull_shift) / determinant, *SCALE_BOUNDS)
            # The best shift for that scale: where the scale is at its bound it is another one than Newton's.
            shift = np.clip((pull_shift - scale_shift * scale) / shift_shift, *SHIFT_BOUNDS)
        return LogisticMap(scale, shift)


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
    """Return the area under the ROC curve of predictions [n], from a histogram of 1000 bins, ties with half credit.

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


Temperature = Annotated[float, Meta(ge=0.05, le=20.0)]
"""What a file may hold; beyond, a head is a constant or a step, and its file a mistake."""

GRID_LIMIT = 4.0
GRID_STEPS = 100
TIE = 1e-12
"""ECEs closer than this are equal: sums in another order differ by as much."""


def fit_sts(logits: Floats, accepted: Ints) -> Floats:
    """Fit one temperature per position, in order, with the earlier ones frozen.

    ``T_k = argmin_T ECE(prod_{i<k} sigmoid(z_i / T_i) * sigmoid(z_k / T), prefix accepted through k)`` over 201
    log-spaced temperatures from 1/4 to 4. Of equal ones the nearest to 1 wins, then the larger. The paper leaves grid,
    bins and ties open; bins are the evaluator's 20.

    Args:
        logits: [n, gamma] raw logits of rounds whose whole block was verified.
        accepted: [n] drafts accepted in each.

    Returns:
        [gamma] float64

    Raises:
        ConfigError: no rounds, or logits that are not finite.
    """
    logits = np.asarray(logits, dtype=np.float64)
    if not len(logits):
        raise ConfigError("logits=[]: no round to fit temperatures to; collect rounds whose whole block was verified")
    if not np.isfinite(logits).all():
        raise ConfigError("logits hold NaN or infinite values; check the drafter with sglang-dspark doctor")
    outcomes = survived(accepted, logits.shape[1])
    steps = np.arange(1, GRID_STEPS + 1) * (math.log(GRID_LIMIT) / GRID_STEPS)
    # Temperatures by distance from 1, of equally distant ones the larger first.
    grid = np.exp(np.concatenate([[0.0], np.stack([steps, -steps], axis=1).ravel()]))
    survival = np.ones(len(logits))
    temperatures = np.ones(logits.shape[1])
    for k in range(logits.shape[1]):
        found = np.array([ece(survival * sigmoid(logits[:, k] / t), outcomes[:, k]) for t in grid])
        temperatures[k] = grid[np.argmax(found <= found.min() + TIE)]
        survival = survival * sigmoid(logits[:, k] / temperatures[k])
    return temperatures


class StsCalibration(
    msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True, tag_field="version", tag=1
):
    """Temperatures with their origin; the fields are the keys of the file, see the module."""

    temperatures: tuple[Temperature, ...]
    target: str | None = None
    draft: str | None = None
    dataset: str = ""
    num_samples: Annotated[int, Meta(ge=0)] = 0
    ece_before: tuple[float, ...] = ()
    ece_after: tuple[float, ...] = ()
    ece_shifted: tuple[float, ...] = ()  # of files of earlier versions

    def save(self, path: Path) -> None:
        """Write the file.

        Raises:
            ConfigError: it cannot be written.
        """
        try:
            with atomic_write(path) as partial:
                partial.write_bytes(msgspec.json.format(msgspec.json.encode(self)) + b"\n")
        except OSError as error:
            raise ConfigError(
                f"{path}: cannot be written ({error.strerror}); name a file in a folder that you may write to"
            ) from error

    @classmethod
    def load(cls, path: Path, gamma: int, *, target: str | None = None, draft: str | None = None) -> Self:
        """Read a file for a server with blocks of ``gamma`` drafts.

        Args:
            target: the model that is served, name or path; checked against the file where both are given. Only the
                last part of a path counts: the same model lies elsewhere on another machine.
            draft: its drafter, likewise.

        Raises:
            ConfigError: the file is missing, malformed, or made for another block size or pair.
        """
        try:
            document = msgspec.json.decode(path.read_bytes())
            calibration = msgspec.convert(document, cls)
        except (OSError, msgspec.MsgspecError) as error:
            raise ConfigError(f"{path}: {error}; make one with sglang-dspark calibrate") from error
        if "version" not in document:
            raise ConfigError(
                f"{path} has no version, as files for SGLang's own worker; make one for the plugin's worker with "
                "sglang-dspark calibrate"
            )
        if (count := len(calibration.temperatures)) != gamma:
            raise ConfigError(
                f"{path}: {count} temperatures for blocks of {gamma} drafts; calibrate with this drafter and block size"
            )
        for key, measured, served in (("target", calibration.target, target), ("draft", calibration.draft, draft)):
            if measured and served and checkpoint_name(measured).lower() != checkpoint_name(served).lower():
                raise ConfigError(
                    f"{path}: {key}={measured!r:.80}: but {served!r} is served; calibrate this pair, or remove the key "
                    "if they are the same weights"
                )
        return calibration
