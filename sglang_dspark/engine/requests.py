"""What a request may ask for."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from sglang.srt.managers.io_struct import GenerateReqInput

from sglang_dspark.engine import speculation

_UNSERVED = ("return_hidden_states", "custom_logit_processor", "lora_path", "input_embeds")


def check_request(result: None, manager: Any, request: Any, input_ids: Any) -> None:
    """Refuse a generation request that DSPARK would answer differently from the target alone, or not survive.

    Runs after SGLang's own validation, for every route and the offline engine.

    Raises:
        ValueError: names the field and its value; SGLang answers HTTP 400.
    """
    if isinstance(request, GenerateReqInput):
        for refusal in _refusals(request, manager.model_config.vocab_size):
            raise ValueError(refusal)
        speculation.settle(manager, request)


def _refusals(request: GenerateReqInput, vocab_size: int) -> Iterator[str]:
    for name in _UNSERVED:
        value = getattr(request, name, None)
        if value:
            yield f"DSPARK does not serve {name}={_shown(value)} yet; drop the field or use a server without DSPARK"
    if not request.return_logprob:
        return
    # SGLang looks these up without a check, in the process that serves everybody.
    number = request.top_logprobs_num or 0
    if not 0 <= number <= vocab_size:
        yield f"top_logprobs_num={_shown(number)} is not a number of tokens; pass 0 to {vocab_size}"
    for token in request.token_ids_logprob or ():
        if not 0 <= token < vocab_size:
            yield f"token_ids_logprob names {_shown(token)}, which is no token; pass ids from 0 to {vocab_size - 1}"


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 80 else text[:77] + "..."
