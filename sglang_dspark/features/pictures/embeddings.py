"""Keep the embeddings of prompts with pictures, whose ids no embedding has."""

from __future__ import annotations

import torch
from sglang.srt.model_executor.forward_batch_info import ForwardBatch


def keep_embeddings(
    embeddings: torch.Tensor, input_ids: object, forward_batch: ForwardBatch, *args: object, **kwargs: object
) -> None:
    """Keep a copy of a prefill's embeddings [n, d], as they are before the first layer."""
    if forward_batch.mm_input_embeds is not None:
        forward_batch.mm_input_embeds = embeddings.clone()
