"""Serve log-probabilities in a scheduler."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from sglang_dspark.engine.feature import DrawnTokens, Part
from sglang_dspark.features.logprobs.rows import drop_rejected, with_logprobs


class Logprobs(Part):
    """Have answers carry the log-probabilities that requests ask for."""

    @classmethod
    def of(cls, worker: Any) -> Logprobs:
        """Return the part of a worker."""
        return cls()

    def tokens_drawn(self, batch: Any, output: Any, drawn: DrawnTokens) -> Any:
        return with_logprobs(batch, output, *drawn) if batch.return_logprob else output

    def tokens_come(self, batch: Any, result: Any, tokens: Sequence[Sequence[int]]) -> None:
        if batch.return_logprob:
            drop_rejected(result.logits_output, list(map(len, tokens)))
