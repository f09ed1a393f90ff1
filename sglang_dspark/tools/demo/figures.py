"""What the answers of a demo amount to: medians with their spread, and two ratios that never mix."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from sglang_dspark.tools.demo.questioner import Answer
from sglang_dspark.tools.demo.turns import Measured, Mode


@dataclass(frozen=True)
class Spread:
    """Median and quartiles: half of the values lie from ``low`` to ``high``."""

    median: float
    low: float
    high: float

    @classmethod
    def of(cls, values: Iterable[float]) -> Spread:
        """Of at least one value."""
        low, median, high = np.percentile(list(values), (25, 50, 75)).tolist()
        return cls(median, low, high)


def answers(measured: Sequence[Measured], mode: Mode, prompt: int | None = None) -> list[Answer]:
    """The answers of one mode, to one prompt or to all."""
    return [m.answer for m in measured if m.turn.mode == mode and prompt in (None, m.turn.prompt)]


def speed(measured: Sequence[Measured], mode: Mode, prompt: int | None = None) -> Spread:
    """Tokens per second of single answers, prefill included."""
    return Spread.of(answer.tokens_per_second for answer in answers(measured, mode, prompt))


def ratio(measured: Sequence[Measured], faster: Mode, slower: Mode, prompt: int | None = None) -> Spread:
    """Return how many times as fast one mode answered as another: the same prompt in the same round makes a pair."""
    speeds = {
        mode: {
            (m.turn.round, m.turn.prompt): m.answer.tokens_per_second
            for m in measured
            if m.turn.mode == mode and prompt in (None, m.turn.prompt)
        }
        for mode in (faster, slower)
    }
    return Spread.of(speeds[faster][pair] / speeds[slower][pair] for pair in speeds[slower])


def accept_length(given: Sequence[Answer]) -> float | None:
    """Tokens per decode round over all answers, bonus token included; None without DSPARK."""
    num_rounds = sum(answer.num_rounds for answer in given)
    return sum(answer.num_committed for answer in given) / num_rounds if num_rounds else None


def first_difference(left: str, right: str) -> int | None:
    """Index of the first character that differs, None for equal texts."""
    if left == right:
        return None
    pairs = enumerate(zip(left, right, strict=False))
    return next((index for index, (a, b) in pairs if a != b), min(len(left), len(right)))
