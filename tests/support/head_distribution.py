"""Rounds of a head whose distribution is known."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from sglang_dspark.scheduling.sts import Floats, Ints, ece, prefix_survival, sigmoid, survived

GAMMA = 7

DISTORTIONS: dict[str, Callable[[Floats], Floats]] = {
    "none": lambda z: z,
    "times 3": lambda z: 3 * z,
    "a third": lambda z: z / 3,
    "minus 3": lambda z: z - 3,
}


def draw_rounds(rng: np.random.Generator, num_rounds: int, gamma: int = GAMMA) -> tuple[Floats, Ints]:
    """Logits [n, gamma] of a perfectly calibrated head, and accepted counts [n] drawn by them."""
    logits = rng.normal(1.5, 1.5, (num_rounds, gamma))
    kept = rng.random((num_rounds, gamma)) < sigmoid(logits)
    return logits, np.cumprod(kept, axis=1).sum(axis=1)


def survival_eces(logits: Floats, accepted: Ints) -> list[float]:
    """ECE of prefix survival by position."""
    survival, outcomes = prefix_survival(sigmoid(logits)), survived(accepted, logits.shape[1])
    return [ece(predicted, outcome) for predicted, outcome in zip(survival.T, outcomes.T, strict=True)]
