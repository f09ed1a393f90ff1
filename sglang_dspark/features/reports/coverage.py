"""Counts the tokens of answers that the drafter cannot propose, where it proposes a part of the vocabulary."""

from __future__ import annotations

import logging
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from sglang_dspark.config import flag_name
from sglang_dspark.step.record import StepRecord

logger = logging.getLogger(__name__)

SPAN = 4096
"""Tokens that are judged together."""
LEAST = 0.95
"""Share of proposed tokens below which the log warns.

Blocks end at a token that cannot be proposed. Where each of 7 drafts would else be accepted with probability 0.75, an
accept length of 3.6 becomes 3.2.
"""


class Coverage:
    """Counts what steps commit. The log says once that too many of the last tokens are none that the drafter proposes.

    Args:
        proposed: [V + 1] whether it proposes a token; the last one is for the -1 behind a request's tokens. None for
            all tokens.
    """

    def __init__(self, proposed: NDArray[np.bool_] | None) -> None:
        self._proposed = proposed
        self._tokens = self._missing = 0
        self._warned = False

    def missing(self, record: StepRecord, running: Sequence[int]) -> int:
        """Return how many tokens of a step are not proposed.

        Args:
            running: requests of the step that its tokens are for.
        """
        if self._proposed is None or record.committed is None:  # tokens that come beside a prompt are no drafts
            return 0
        tokens = record.committed.numpy()[list(running)]
        missing = int((~self._proposed[tokens]).sum())
        self._tokens += int((tokens >= 0).sum())
        self._missing += missing
        if self._tokens >= SPAN:
            self._judge()
            self._tokens = self._missing = 0
        return missing

    def _judge(self) -> None:
        covered = 1 - self._missing / self._tokens
        if self._proposed is None or covered >= LEAST or self._warned:
            return
        self._warned = True
        logger.warning(
            "DSPARK: the drafter proposes %d of %d tokens, which are %.1f %% of the last %d tokens of answers; blocks "
            "end at the others. Texts stay exact, but decoding is slower. If the drafter has heads for all tokens, a "
            "list by `sglang-dspark vocabulary`, passed with %s, follows the answers",
            *(self._proposed[:-1].sum(), len(self._proposed) - 1),
            100 * covered,
            self._tokens,
            flag_name("draft_vocabulary"),
        )
