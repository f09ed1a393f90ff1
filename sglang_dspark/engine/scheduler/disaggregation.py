"""Prompts encoded by one server and decoded by another (PD disaggregation): what of DSPARK's state crosses over.

The K/V of a prompt does, the drafter's as more layers of the target's: its rows have the numbers of the target's K/V
slots, so that one list of slots says where both lie. Hidden states need not, for the server that encoded the prompt has
already made draft K/V of them. The first token crosses with SGLang's metadata, and is the anchor of the first block.

The flag is refused still; docs/disaggregation.md says what is missing.
"""

from __future__ import annotations

from typing import Any

import torch
from sglang.srt.managers.overlap_utils import RelayPayload

from sglang_dspark.engine.scheduler.draft_input import DSparkDraftInput


def first_draft_input(batch: Any, first_tokens: torch.Tensor, future_map: Any) -> DSparkDraftInput:
    """The draft state of requests whose prompts another server has encoded.

    Args:
        batch: SGLang's batch of them, with ``seq_lens`` [bs], the tokens whose K/V has arrived.
        first_tokens: [bs] int64, the last token of each request, whose K/V nobody has computed yet.
        future_map: SGLang's relay, from which the next step reads tokens and lengths under overlap.
    """
    state = DSparkDraftInput(bonus_tokens=first_tokens, new_seq_lens=batch.seq_lens.to(torch.int64))
    if batch.enable_overlap:
        state.future_indices = batch.req_pool_indices
        future_map.publish(state.future_indices, state.new_seq_lens)
        future_map.stash(state.future_indices, RelayPayload.from_draft_input(state))
    return state
