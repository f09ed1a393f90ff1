"""What a request may ask for."""

from __future__ import annotations

import logging
import math
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from functools import cache
from numbers import Integral
from types import NoneType, UnionType
from typing import Any, Union, get_args, get_origin

import msgspec
from sglang.srt.managers.io_struct import GenerateReqInput

from sglang_dspark.declared import shown
from sglang_dspark.draft.families import family_of
from sglang_dspark.engine.front_end.served_requests import REFUSED_FIELDS, REFUSED_PARAMETERS
from sglang_dspark.engine.scheduler import options as request_options

logger = logging.getLogger(__name__)

# What Python raises where a field is of another type than the code that reads it expects.
_OF_WRONG_TYPES = (ArithmeticError, AttributeError, LookupError, RecursionError, TypeError)
_INT32_MAX, _FLOAT32_MAX = 2**31 - 1, 3.4028234663852886e38
_MEDIA = ("image_data", "video_data", "audio_data")


def check_request(result: None, manager: Any, request: Any, input_ids: Any) -> None:
    """Refuse a generation request that DSPARK would answer differently from the target alone, or not survive.

    Runs after SGLang's own validation, for every route and the offline engine.

    Raises:
        ValueError: names the field and its value; SGLang answers HTTP 400.
    """
    if isinstance(request, GenerateReqInput):
        if input_ids is not None:
            check_ids(input_ids, manager.model_config.vocab_size)
        for refusal in _refusals(request, manager.model_config):
            raise ValueError(refusal)
        request_options.settle(manager, request)


def check_ids(ids: Sequence[Any], vocab_size: int) -> None:
    """Refuse a prompt without a token, and ids that no embedding has: the scheduler would end, plain SGLang's too.

    Raises:
        ValueError: names the first wrong one.
    """
    if len(ids) == 0:
        raise ValueError("the prompt has no token; pass a text or input_ids of at least one")
    whole = all(issubclass(kind, Integral) for kind in set(map(type, ids)))
    if whole and min(ids) >= 0 and max(ids) < vocab_size:
        return
    wrong = next(token for token in ids if not isinstance(token, Integral) or not 0 <= int(token) < vocab_size)
    raise ValueError(f"input_ids holds {shown(wrong)}, which is no token id; pass integers from 0 to {vocab_size - 1}")


def _refusals(request: GenerateReqInput, target: Any) -> Iterator[str]:
    vocab_size = target.vocab_size
    for name in REFUSED_FIELDS:
        value = getattr(request, name, None)
        if value:
            yield f"DSPARK does not serve {name}={shown(value)} yet; drop the field or use a server without DSPARK"
    parameters = request.sampling_params if isinstance(request.sampling_params, Mapping) else {}
    for name in REFUSED_PARAMETERS:
        if (value := parameters.get(name)) not in (None, False, 1):
            yield f"DSPARK does not serve sampling_params.{name}={shown(value)} yet; drop it"
    # SGLang takes these targets for text models, as it was told to, and would drop images in silence.
    for name in _MEDIA if family_of(target.hf_config.architectures).reads_images else ():
        if getattr(request, name, None):
            yield f"DSPARK serves the text of this target, and not {name} yet; use a server without DSPARK"
    number = request.top_logprobs_num or 0
    if request.return_logprob and not 0 <= number <= vocab_size:
        # The scheduler would end over it, plain SGLang's too.
        yield f"top_logprobs_num={shown(number)} is out of range; pass 0 to {vocab_size}"


def check_types(original: Callable[..., Any], manager: Any, *args: Any, **kwargs: Any) -> Any:
    """Refuse fields and sampling parameters of a wrong type, over which the scheduler would end.

    Around SGLang's making of the object that travels to the scheduler.

    Raises:
        ValueError: names the field or parameter; SGLang answers HTTP 400.
    """
    try:
        tokenized = original(manager, *args, **kwargs)
    except TypeError as error:
        raise ValueError(f"sampling_params: {error}") from error
    _check_fields(tokenized)
    parameters = tokenized.sampling_params
    for field in msgspec.structs.fields(parameters):
        if field.name == "custom_params":
            continue  # what these may hold is for those to say who read them
        try:
            msgspec.convert(msgspec.to_builtins(getattr(parameters, field.name), str_keys=True), field.type)
        except (TypeError, msgspec.ValidationError) as error:
            raise ValueError(f"sampling_params: {field.name}: {error}") from error
    for refusal in _out_of_range(parameters):
        raise ValueError(f"sampling_params: {refusal}")
    _drop_impossible_stops(parameters, manager.model_config.vocab_size)
    return tokenized


def _out_of_range(parameters: Any) -> Iterator[str]:
    """What of SGLang's ``SamplingParams`` its tensors cannot hold: making them would end the scheduler."""
    for name in ("top_k", "min_new_tokens"):
        if (value := getattr(parameters, name)) > _INT32_MAX:
            yield f"{name}={value} is out of range; pass at most {_INT32_MAX}"
    for token, bias in (parameters.logit_bias or {}).items():
        if math.isnan(bias) or _FLOAT32_MAX < abs(bias) < math.inf:
            yield f"logit_bias of token {token} is {bias}; pass a number that float32 holds"


def _drop_impossible_stops(parameters: Any, vocab_size: int) -> None:
    """Leave only stop tokens that can come.

    SGLang looks others up in a row of the vocabulary when any request of the batch asks for a minimum length, and ends.
    """
    if stops := parameters.stop_token_ids:
        parameters.stop_token_ids = {token for token in stops if 0 <= token < vocab_size}


def _check_fields(tokenized: msgspec.Struct) -> None:
    """Raise ValueError where a field is not of the type that SGLang declares."""
    declared = _plain_fields(type(tokenized))
    values = {name: getattr(tokenized, name) for name in declared.__struct_fields__}
    try:
        msgspec.convert(values, declared)
    except msgspec.ValidationError as error:
        raise ValueError(f"{error}; $ is the request") from error


@cache
def _plain_fields(kind: type[msgspec.Struct]) -> type[msgspec.Struct]:
    """The fields of ``kind`` that a client can set: those that JSON has values for."""
    fields = [(field.name, field.type) for field in msgspec.structs.fields(kind) if _is_plain(field.type)]
    return msgspec.defstruct(kind.__name__, fields, kw_only=True)


def _is_plain(declared: Any) -> bool:
    if parts := get_args(declared):
        return get_origin(declared) in (list, dict, Union, UnionType) and all(map(_is_plain, parts))
    return declared in (bool, int, float, str, NoneType)


async def refuse_unreadable(original: Callable[..., AsyncIterator[Any]], *args: Any, **kwargs: Any) -> Any:
    """Refuse a request whose fields are of types that SGLang takes for granted, instead of failing with HTTP 500.

    Around SGLang's handling of a request, from its fields to its last answer.

    Raises:
        ValueError: says what failed before the first answer; SGLang answers HTTP 400.
    """
    answered = False
    try:
        async for answer in original(*args, **kwargs):
            answered = True
            yield answer
    except _OF_WRONG_TYPES as error:
        if answered:
            raise
        raise _unreadable(error) from error


def refuse_unreadable_messages(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """The same around SGLang's way from a body of the OpenAI routes to a request."""
    try:
        return original(*args, **kwargs)
    except _OF_WRONG_TYPES as error:
        raise _unreadable(error) from error


def _unreadable(error: Exception) -> ValueError:
    logger.warning("DSPARK: a request cannot be read", exc_info=error)
    return ValueError(f"the request cannot be read: {type(error).__name__}: {error}")
