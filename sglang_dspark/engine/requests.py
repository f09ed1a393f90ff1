"""What a request may ask for."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import msgspec
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
    for name, least, most in (("top_logprobs_num", 0, vocab_size), ("logprob_start_len", -1, None)):
        value = getattr(request, name)
        if not isinstance(value, int) or value < least or (most is not None and value > most):
            yield f"{name}={_shown(value)} is out of range; pass an integer from {least}" + (
                f" to {most}" if most else ""
            )
    named = request.token_ids_logprob
    if named is None:
        return
    if not isinstance(named, list) or not all(isinstance(token, int) and 0 <= token < vocab_size for token in named):
        yield f"token_ids_logprob={_shown(named)}; pass a list of token ids from 0 to {vocab_size - 1}"


def check_types(original: Callable[..., Any], manager: Any, *args: Any, **kwargs: Any) -> Any:
    """Refuse sampling parameters of a wrong type, which would otherwise be found out by the scheduler, and end it.

    Around SGLang's making of the object that travels to the scheduler.

    Raises:
        ValueError: names the parameter; SGLang answers HTTP 400.
    """
    try:
        tokenized = original(manager, *args, **kwargs)
        parameters = msgspec.to_builtins(tokenized.sampling_params, str_keys=True)
        # What custom_params may hold is for those to say who read it.
        msgspec.convert({**parameters, "custom_params": None}, type(tokenized.sampling_params))
    except (TypeError, msgspec.ValidationError) as error:
        raise ValueError(f"sampling_params: {error}") from error
    return tokenized


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 80 else text[:77] + "..."
