"""The outcome of decode steps, kept until it is learned from."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from dspark_kernels import Candidates
from numpy.typing import NDArray

from sglang_dspark.step.record import StepRecord


@dataclass(frozen=True)
class StepFeedback:
    """The outcome of a step.

    Attributes:
        record: of the step.
        requests: indices of its requests that were drafted and are still running.
        accept_lens: drafts accepted of each.
    """

    record: StepRecord
    requests: list[int]
    accept_lens: list[int]

    def confidence(self, width: int) -> NDArray[np.float64]:
        """Return [2, n, width] logits and survivals, NaN past the drafted depth."""
        confidence = self.record.confidence
        assert confidence is not None
        depth = confidence.survival.shape[1]
        padded = np.full((2, len(self.requests), width), np.nan)
        if confidence.logits is not None:
            padded[0, :, :depth] = confidence.logits.numpy()[self.rows]
        padded[1, :, :depth] = confidence.survival.numpy()[self.rows]
        return padded

    def chains(self) -> list[NDArray[np.int64]]:
        """Return of the requests, [n] each, what :meth:`ChainWeights.observe` learns from."""
        assert self.record.chains is not None
        assert self.record.committed is not None
        rows, _, candidates = Candidates.parts(self.record.chains.numpy()[self.rows])
        committed = self.record.committed.numpy()[self.rows]
        width = min(candidates.shape[1], committed.shape[1])
        lengths = (candidates[:, :width] >= 0).cumprod(1).sum(1)
        seen = np.minimum(np.asarray(self.accept_lens) + 1, lengths)
        right = (candidates[:, :width] == committed[:, :width]).cumprod(1).sum(1)
        return [rows, np.minimum(right, seen), seen]

    @property
    def rows(self) -> slice | list[int]:
        """Return an index of the requests: a slice, which is much faster than a list, if they are all of the step's."""
        return slice(None) if len(self.requests) == len(self.record.requests) else self.requests


def verified_and_accepted(feedback: Sequence[StepFeedback]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return the drafts verified and accepted, [n] each, of all requests of all steps.

    None are of a round in which a preset copied: it says nothing about the drafter.
    """
    verified = np.concatenate([step.record.verify_lens.numpy()[step.rows] for step in feedback])
    drawn = np.concatenate([np.array(step.record.copied)[step.rows] == 0 for step in feedback])
    return verified * drawn, np.concatenate([step.accept_lens for step in feedback]) * drawn


def repeat_by_weight(feedback: Sequence[StepFeedback], *columns: NDArray[Any]) -> list[NDArray[Any]]:
    """Return ``columns`` [n, ...] of all requests of all steps, each request as often as a round of its step counts."""
    weights = [step.record.decision.weight for step in feedback for _ in step.requests]
    return list(columns) if max(weights) == 1 else [np.repeat(column, weights, axis=0) for column in columns]
