"""Count the tokens of answers in a scheduler, and have the drafter propose those that its list lacks."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from sglang_dspark.draft.reduced_vocabulary import ProposalHeads
from sglang_dspark.engine.part import Part
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
        worker: ours.
    """

    def __init__(self, worker: Any) -> None:
        self._worker = worker
        self._heads: ProposalHeads | None = None
        self._tokens = self._replaced = 0
        self._next: tuple[NDArray[np.int64], NDArray[np.int64]] | None = None

    def ready(self) -> None:
        """Begin to count, if the drafter has heads for tokens that are not listed; added ones stay, as in templates."""
        heads, tokenizer = self._worker.drafter.heads, self._worker.target_worker.tokenizer
        if heads.has_others:
            self._heads, (self._listed, self._proposed) = heads, heads.listed
            self._counts = np.zeros(len(self._proposed), np.float32)
            kept = list(getattr(tokenizer, "added_tokens_decoder", ()))
            self._may_go = ~np.isin(self._listed, kept)

    def report(self) -> Mapping[str, object]:
        return {"replaced_tokens": self._replaced}

    @fenced("the list of proposed tokens", instead=nothing)
    def step_done(
        self, reqs: Sequence[Req], record: StepRecord, running: Sequence[int], accepted: Sequence[int]
    ) -> None:
        if self._heads is None or record.committed is None:
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
        if number:
            self._next = columns[:number], missing[:number]

    @fenced("the list of proposed tokens", instead=nothing)
    def batch_comes(self, batch: ScheduleBatch) -> None:
        if self._heads is None or self._next is None:
            return
        (columns, tokens), self._next = self._next, None
        self._heads.replace(columns.tolist(), tokens.tolist())
        self._replaced += len(tokens)
        logger.info("DSPARK: the drafter proposes %d other tokens, which answers have", len(tokens))
