"""What a request may ask for."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import msgspec
from sglang.srt.managers.io_struct import GenerateReqInput

from sglang_dspark.engine.scheduler import options as speculation
from sglang_dspark.engine.startup.served import REFUSED_FIELDS, REFUSED_FIELDS_OF_SOME_RELEASES

_UNSERVED_PARAMETERS = ("watermark", "beam_width")
_MEDIA = ("image_data", "video_data", "audio_data")


def check_request(result: None, manager: Any, request: Any, input_ids: Any) -> None:
    """Refuse a generation request that DSPARK would answer differently from the target alone, or not survive.

    Runs after SGLang's own validation, for every route and the offline engine.

    Raises:
        ValueError: names the field and its value; SGLang answers HTTP 400.
    """
    if isinstance(request, GenerateReqInput):
        for refusal in _refusals(request, manager.model_config):
            raise ValueError(refusal)
        speculation.settle(manager, request)


def _refusals(request: GenerateReqInput, target: Any) -> Iterator[str]:
    vocab_size = target.vocab_size
    for name in (*REFUSED_FIELDS, *REFUSED_FIELDS_OF_SOME_RELEASES):
        value = getattr(request, name, None)
        if value:
            yield f"DSPARK does not serve {name}={_shown(value)} yet; drop the field or use a server without DSPARK"
    parameters = request.sampling_params if isinstance(request.sampling_params, Mapping) else {}
    for name in _UNSERVED_PARAMETERS:
        if (value := parameters.get(name)) not in (None, False, 1):
            yield f"DSPARK does not serve sampling_params.{name}={_shown(value)} yet; drop it"
    for name in _MEDIA if target.is_multimodal else ():
        if getattr(request, name, None):
            yield f"DSPARK serves the text of this target, and not {name} yet; use a server without DSPARK"
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
    except TypeError as error:
        raise ValueError(f"sampling_params: {error}") from error
    parameters = tokenized.sampling_params
    for field in msgspec.structs.fields(parameters):
        if field.name == "custom_params":
            continue  # what these may hold is for those to say who read them
        try:
            msgspec.convert(msgspec.to_builtins(getattr(parameters, field.name), str_keys=True), field.type)
        except (TypeError, msgspec.ValidationError) as error:
            raise ValueError(f"sampling_params: {field.name}: {error}") from error
    return tokenized


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 80 else text[:77] + "..."
