"""Let texts end in a scheduler where they would end without speculation."""

from __future__ import annotations

from collections.abc import Sequence

from sglang_dspark.engine.feature import Part
from sglang_dspark.engine.scheduler.batch import DSparkBatchResult
from sglang_dspark.engine.sglang_types import Req, ScheduleBatch
from sglang_dspark.features.ends.first_end import let_first_end_count


class Ends(Part):
    """Have the first of several ends count."""

    def tokens_come(self, batch: ScheduleBatch, result: DSparkBatchResult, tokens: Sequence[Sequence[int]]) -> None:
        let_first_end_count(batch.reqs, tokens)

    def request_ended(self, req: Req) -> None:
        """Take off the reasoning tokens that SGLang has counted behind the end, before it looked for it.

        Reasoning stands at the beginning of a text, so it has at most as many tokens as the text.
        """
        req.reasoning_tokens = min(req.reasoning_tokens, len(req.output_ids_through_stop))
