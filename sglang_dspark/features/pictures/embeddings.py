"""Keep the embeddings of prompts with pictures, whose ids no embedding has."""

from typing import Any

from sglang.srt.model_executor.forward_batch_info import ForwardBatch


def keep_embeddings(embeddings: Any, input_ids: Any, forward_batch: ForwardBatch, *args: Any, **kwargs: Any) -> None:
    """Keep a copy of a prefill's embeddings [n, d], as they are before the first layer."""
    if forward_batch.mm_input_embeds is not None:
        forward_batch.mm_input_embeds = embeddings.clone()
