"""What a request may ask for."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import msgspec
from sglang.srt.managers.io_struct import GenerateReqInput

from sglang_dspark.engine.scheduler import options as speculation
from sglang_dspark.engine.startup.served import REFUSED_FIELDS


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
    for name in REFUSED_FIELDS:
        value = getattr(request, name, None)
        if value:
            yield f"DSPARK does not serve {name}={_shown(value)} yet; drop the field or use a server without DSPARK"
    number = request.top_logprobs_num or 0
    if request.return_logprob and not 0 <= number <= vocab_size:
        # The scheduler would end over it, plain SGLang's too.
        yield f"top_logprobs_num={_shown(number)} is out of range; pass 0 to {vocab_size}"


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
