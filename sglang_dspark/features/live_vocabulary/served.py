"""Count the tokens of answers in a scheduler, and have the drafter propose those that its list lacks."""

from __future__ import annotations

import logging
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from sglang_dspark.draft.reduced_vocabulary import ProposalHeads
from sglang_dspark.engine.feature import Part
from sglang_dspark.engine.sglang_types import Req, ScheduleBatch
from sglang_dspark.fence import fenced, nothing
from sglang_dspark.step.record import StepRecord

logger = logging.getLogger(__name__)

SPAN = 1024
"""Tokens behind which the list is judged; then counts are halved."""
LEAST = 0.98
"""Share of counted tokens that the list has, below which it changes."""


class LiveVocabulary(Part):
    """Replaces tokens that answers do not have by those that they have, between two steps.

    What a step drafts depends on the tokens of earlier steps alone. All ranks count alike.

    Args:
        heads: that draft from a list, and have rows for other tokens.
        kept: tokens that stay on the list, such as those of chat templates.
    """

    def __init__(self, heads: ProposalHeads, kept: Collection[int]) -> None:
        assert heads.listed is not None, "there is a list"
        self._heads, (self._listed, self._proposed) = heads, heads.listed
        self._counts = np.zeros(len(self._proposed), np.float32)
        self._may_go = ~np.isin(self._listed, list(kept))
        self._tokens = self._replaced = 0
        self._next: tuple[NDArray[np.int64], NDArray[np.int64]] | None = None

    @classmethod
    def of(cls, worker: Any) -> LiveVocabulary | None:
        """Return the part of our worker; None if its drafter has no heads but those of the list."""
        if not worker.drafter.num_drawn or not worker.drafter.heads.has_others:
            return None
        tokenizer = worker.target_worker.tokenizer
        return cls(worker.drafter.heads, () if tokenizer is None else tokenizer.added_tokens_decoder)

    def report(self) -> Mapping[str, object]:
        return {"replaced_tokens": self._replaced}

    @fenced("the list of proposed tokens", instead=nothing)
    def step_done(
        self, reqs: Sequence[Req], record: StepRecord, running: Sequence[int], accepted: Sequence[int]
    ) -> None:
        if record.committed is None:
            return
        tokens = record.committed.numpy()[list(running)].ravel()
        np.add.at(self._counts, tokens, 1)
        self._counts[-1] = 0  # of the -1 behind a request's tokens
        self._tokens += int((tokens >= 0).sum())
        if self._tokens >= SPAN:
            self._judge()
            self._tokens = 0
            self._counts /= 2

    def _judge(self) -> None:
        """Choose what is replaced before the next step."""
        counts, listed = self._counts, self._listed
        if counts[self._proposed].sum() >= LEAST * counts.sum():
            return
        missing = np.flatnonzero(~self._proposed & (counts > 0))
        missing = missing[np.argsort(-counts[missing], kind="stable")]
        # Tokens of large ids are the rarest ones of a tokenizer.
        columns = np.lexsort((-listed, counts[listed]))
        columns = columns[self._may_go[columns]]
        most = min(len(missing), len(columns))
        number = int((counts[missing[:most]] > counts[listed[columns[:most]]]).sum())
        self._next = columns[:number], missing[:number]

    @fenced("the list of proposed tokens", instead=nothing)
    def batch_comes(self, batch: ScheduleBatch) -> None:
        if self._next is None:
            return
        (columns, tokens), self._next = self._next, None
        self._heads.replace(columns.tolist(), tokens.tolist())
        self._replaced += len(tokens)
        logger.info("DSPARK: the drafter proposes %d other tokens, which answers have", len(tokens))
