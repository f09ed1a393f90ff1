"""Hand SGLang the states that the LM head has read, in the rows in which SGLang looks for them."""

from __future__ import annotations

from dataclasses import replace

import torch
from sglang.srt.layers.logits_processor import LogitsProcessorOutput

from sglang_dspark.engine.feature import DrawnTokens, Part, Worker
from sglang_dspark.engine.sglang_types import ScheduleBatch


def last_states(processor: object, hidden_states: torch.Tensor, *_given: object) -> torch.Tensor:
    """Return what a forward's ``last_hidden_states`` shall be: the states [N, d] of all rows before the LM head."""
    return hidden_states


class HiddenStates(Part):
    """Have answers carry the states that requests ask for.

    Args:
        whole_prompts: whether SGLang looks for the states of all tokens of a prefill, and not of each prompt's last.
    """

    def __init__(self, *, whole_prompts: bool) -> None:
        self._whole_prompts = whole_prompts

    @classmethod
    def of(cls, worker: Worker) -> HiddenStates:
        """Return the part of a worker."""
        return cls(whole_prompts=worker.server_args.return_hidden_states_mode != "last")

    def tokens_drawn(
        self, batch: ScheduleBatch, output: LogitsProcessorOutput, drawn: DrawnTokens
    ) -> LogitsProcessorOutput:
        if not batch.return_hidden_states:
            return output
        states = output.last_hidden_states
        if drawn.tokens.ndim > 1:
            # Token i of a request was drawn from its row i; SGLang does not read the rows behind the last token.
            slots = torch.arange(drawn.tokens.shape[1], device=states.device)
            rows = drawn.indptr[: len(batch.reqs), None] + slots
            states = states[rows.view(-1).clamp_max(len(states) - 1)]
        elif not self._whole_prompts:
            states = states[torch.tensor(batch.extend_lens, device=states.device).cumsum(0) - 1]
        return replace(output, hidden_states=states, last_hidden_states=None)
