"""What became of the drafts of decode steps, until it is learned from."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from sglang_dspark.step.record import StepRecord


@dataclass(frozen=True)
class StepFeedback:
    """A step's outcome: requests that were drafted and are still running, and drafts accepted of each."""

    rounds: StepRecord
    requests: list[int]
    accept_lens: list[int]

    def confidence(self, width: int) -> NDArray[np.float64]:
        """[2, n, width] logits and survivals, NaN past the drafted depth."""
        confidence = self.rounds.confidence
        assert confidence is not None
        depth = confidence.survival.shape[1]
        padded = np.full((2, len(self.requests), width), np.nan)
        if confidence.logits is not None:
            padded[0, :, :depth] = confidence.logits.numpy()[self.rows]
        padded[1, :, :depth] = confidence.survival.numpy()[self.rows]
        return padded

    @property
    def rows(self) -> slice | list[int]:
        """Index of the requests; a slice, which is much faster than a list, where they are all of the step's."""
        return slice(None) if len(self.requests) == len(self.rounds.requests) else self.requests


def verified_and_accepted(notes: Sequence[StepFeedback]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Drafts verified and accepted, [n] each, of all requests of all notes."""
    verified = np.concatenate([note.rounds.verify_lens.numpy()[note.rows] for note in notes])
    return verified, np.concatenate([note.accept_lens for note in notes])


def weighted(notes: Sequence[StepFeedback], *columns: NDArray[Any]) -> list[NDArray[Any]]:
    """``columns`` [n, ...] of all requests of all notes, each request as often as a round of its step counts."""
    weights = [note.rounds.decision.weight for note in notes for _ in note.requests]
    return list(columns) if max(weights) == 1 else [np.repeat(column, weights, axis=0) for column in columns]
