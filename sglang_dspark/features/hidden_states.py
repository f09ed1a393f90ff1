"""Hidden states of prompts and output tokens, as SGLang returns them (``return_hidden_states``).

Hand SGLang the states that the LM head has read, in the rows in which SGLang looks for them.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from sglang.srt.layers.logits_processor import LogitsProcessorOutput
from sglang.srt.plugins.hook_registry import HookType

from sglang_dspark.engine.feature import Feature
from sglang_dspark.engine.hooks import hook
from sglang_dspark.engine.part import DrawnTokens, Part, Worker
from sglang_dspark.engine.sglang_types import Req, ScheduleBatch


@hook(
    "sglang.srt.speculative.dflash_utils.validate_dflash_request",
    HookType.REPLACE,
    where="scheduler",
    reason="under overlap the scheduler aborts requests for hidden states, which its own DFLASH cannot serve",
)
def refuse_nothing(req: Req, enable_overlap: bool) -> None:
    """Let the scheduler take any request: the front end has refused what is not served."""


@hook(
    "sglang.srt.layers.logits_processor.LogitsProcessor._get_last_hidden_states_to_store",
    HookType.REPLACE,
    where="scheduler",
    reason="where a drafter reads states of some layers, SGLang returns these in place of the last one's",
)
def last_states(processor: object, hidden_states: torch.Tensor, *_given: object) -> torch.Tensor:
    """Return what a forward's ``last_hidden_states`` shall be: the states [N, d] of all rows before the LM head."""
    return hidden_states


class HiddenStates(Part):
    """Have answers carry the states that requests ask for.

    Args:
        worker: ours.
    """

    def __init__(self, worker: Worker) -> None:
        # Whether SGLang looks for the states of all tokens of a prefill, and not of each prompt's last.
        self._whole_prompts = worker.server_args.return_hidden_states_mode != "last"

    def tokens_drawn(
        self, batch: ScheduleBatch, output: LogitsProcessorOutput, drawn: DrawnTokens
    ) -> LogitsProcessorOutput:
        if not batch.return_hidden_states:
            return output
        states = output.last_hidden_states
        if drawn.tokens.ndim > 1:
            # Token i of a request was drawn from its row i; SGLang does not read the rows after the last token.
            slots = torch.arange(drawn.tokens.shape[1], device=states.device)
            rows = drawn.indptr[: len(batch.reqs), None] + slots
            states = states[rows.view(-1).clamp_max(len(states) - 1)]
        elif not self._whole_prompts:
            states = states[torch.tensor(batch.extend_lens, device=states.device).cumsum(0) - 1]
        return replace(output, hidden_states=states, last_hidden_states=None)


FEATURE = Feature(
    __name__,
    is_used=lambda args: bool(args.enable_return_hidden_states or args.return_hidden_states_mode),
    part=HiddenStates,
)
