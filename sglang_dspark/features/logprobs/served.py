"""Serve log-probabilities in a scheduler."""

from __future__ import annotations

from collections.abc import Sequence

from sglang.srt.layers.logits_processor import LogitsProcessorOutput

from sglang_dspark.engine.part import DrawnTokens, Part
from sglang_dspark.engine.scheduler.batch import DSparkBatchResult
from sglang_dspark.engine.sglang_types import ScheduleBatch
from sglang_dspark.features.logprobs.rows import drop_rejected, with_logprobs


class Logprobs(Part):
    """Have answers carry the log-probabilities that requests ask for."""

    def tokens_drawn(
        self, batch: ScheduleBatch, output: LogitsProcessorOutput, drawn: DrawnTokens
    ) -> LogitsProcessorOutput:
        return with_logprobs(batch, output, *drawn) if batch.return_logprob else output

    def tokens_come(self, batch: ScheduleBatch, result: DSparkBatchResult, tokens: Sequence[Sequence[int]]) -> None:
        if batch.return_logprob:
            drop_rejected(result.logits_output, list(map(len, tokens)))
