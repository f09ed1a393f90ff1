"""Refuse requests that ask for what DSPARK does not serve, or that the scheduler would not survive."""

import copy
import re
from collections.abc import Iterator, Sequence
from typing import Any

import msgspec
from sglang.srt.managers.io_struct import (
    GenerateReqInput,
    TokenizedGenerateReqInput,
    msgpack_decode,
    msgpack_encode,
)
from sglang.srt.plugins.hook_registry import HookType

from sglang_dspark.declared import truncate
from sglang_dspark.draft.families import family_of
from sglang_dspark.engine.api import request_field
from sglang_dspark.engine.compat.arguments import speculating
from sglang_dspark.engine.hooks import hook
from sglang_dspark.engine.launch_state import DSparkServer
from sglang_dspark.engine.sglang_types import ModelConfig, SamplingParams, TokenizerManager

_OTHER_LOGPROBS = "rows of a verification have log-probabilities in the usual form alone"
_ONE_BY_ONE = "it looks at the tokens before each new one, and SGLang does not know drafts as such"
REFUSED_FIELDS = {
    "custom_logit_processor": _ONE_BY_ONE,
    "input_embeds": "a drafter reads the token ids of a prompt",
    "positional_embed_overrides": "a drafter reads the token ids of a prompt",
    "return_indexer_topk": "a verification has rows of drafts that are rejected, and SGLang would return theirs too",
    "multi_item_delimiter_indices": "it scores a prompt, which a server without DSPARK does as fast",
    "watermark": _ONE_BY_ONE,
    "return_sampling_mask": "tokens are drawn without a mask that could be returned",
    "token_indices_to_pool": "it scores a prompt, which a server without DSPARK does as fast",
    "sampling_logprobs_mode": _OTHER_LOGPROBS,
    "return_flat_raw_top_logprobs": _OTHER_LOGPROBS,
    "return_flat_raw_output_top_logprobs": _OTHER_LOGPROBS,
}
"""Fields of a request that DSPARK refuses when they are set, with the reasons."""

REFUSED_PARAMETERS = {"watermark": _ONE_BY_ONE, "beam_width": "each beam would have drafts of its own"}
"""Sampling parameters that are refused if they ask for something, with the reasons."""

_INT32_MAX, _FLOAT32_MAX = 2**31 - 1, 3.4028234663852886e38
_UNTRIED_MEDIA = ("video_data", "audio_data")
_PLACE = re.compile(r"\$\[(\d+)\](?:\[(\d+)\])?")


@hook(
    "sglang.srt.managers.tokenizer_manager.TokenizerManager._create_tokenized_object",
    HookType.AFTER,
    where="front_end",
    reason="a bad field speculation, features that DSPARK does not serve, and what the scheduler would not survive "
    "answer HTTP 400; this makes what travels to the scheduler, for every route and the offline engine",
)
def check_request(tokenized: Any, manager: TokenizerManager, request: Any, *args: object, **kwargs: object) -> None:
    """Refuse a generation request that DSPARK would answer differently from the target alone, or not survive.

    Runs after SGLang has made what travels to the scheduler, for every route and the offline engine.

    Raises:
        ValueError: names the field and its value; SGLang answers HTTP 400.
    """
    if not isinstance(tokenized, TokenizedGenerateReqInput):
        return
    server, parameters = speculating(manager.server_args), tokenized.sampling_params
    if server is None:
        return  # another engine of this process: hooks stay when one ends
    if isinstance(server, DSparkServer):
        refusals = _not_served(request, parameters, manager.model_config)
    else:
        refusals = server.refusals(parameters)
    for refusal in refusals:
        raise ValueError(refusal)
    request_field.settle(manager, tokenized.sampling_params)
    check_types(tokenized)
    vocab_size = manager.model_config.vocab_size
    if tokenized.input_ids is not None:
        session = tokenized.session_params
        check_ids(tokenized.input_ids, vocab_size, in_session=session is not None and bool(session.id))
    for refusal in _out_of_range(tokenized, vocab_size):
        raise ValueError(refusal)
    _drop_impossible_stops(tokenized.sampling_params, vocab_size)
    _drop_unknown_labels(request, manager)
    if not tokenized.return_logprob:
        tokenized.top_logprobs_num = 0  # SGLang takes the largest one of a batch in which others have log-probabilities


def _not_served(request: GenerateReqInput, parameters: SamplingParams, target: ModelConfig) -> Iterator[str]:
    for name, why in REFUSED_FIELDS.items():
        if value := getattr(request, name, None):
            shown = f"{name}={truncate(value)}"
            yield f"DSPARK does not serve {shown}: {why}; drop the field or use a server without DSPARK"
    for name, why in REFUSED_PARAMETERS.items():
        if (value := getattr(parameters, name)) not in (None, False, 1):
            yield f"DSPARK does not serve sampling_params.{name}={truncate(value)}: {why}; drop it"
    for name in _UNTRIED_MEDIA if family_of(target.hf_config.architectures).reads_images else ():
        if getattr(request, name, None):
            yield f"DSPARK serves text and images of this target, and not {name} yet; use a server without DSPARK"


def check_types(tokenized: TokenizedGenerateReqInput) -> None:
    """Refuse values of a type that the scheduler cannot decode: it would end, plain SGLang's too.

    Raises:
        ValueError: names the field.
    """
    travelling = copy.copy(tokenized)
    travelling.time_stats = travelling.mm_inputs = None  # SGLang's own: a pickle, and pictures, which may be large
    try:
        msgpack_decode(msgpack_encode(travelling))
    except msgspec.ValidationError as error:
        raise ValueError(_with_names(str(error), tokenized)) from error


def _with_names(message: str, tokenized: TokenizedGenerateReqInput) -> str:
    """Return msgspec's message with names of fields, which travel by their numbers."""

    def name_of(place: re.Match[str]) -> str:
        name: str = tokenized.__struct_fields__[int(place[1]) - 1]  # the first entry names the struct
        inner = getattr(tokenized, name)
        if place[2] and isinstance(inner, msgspec.Struct):
            return f"{name}.{inner.__struct_fields__[int(place[2])]}"
        return name

    return _PLACE.sub(name_of, message)


def check_ids(ids: Sequence[int], vocab_size: int, *, in_session: bool) -> None:
    """Refuse a prompt without a token, and ids that no embedding has: the scheduler would end, plain SGLang's too.

    Args:
        in_session: whether tokens of earlier turns come before them; SGLang looks at what is then there.

    Raises:
        ValueError: names the first wrong one.
    """
    if len(ids) == 0:
        if in_session:
            return
        raise ValueError("the prompt has no token; pass a text or input_ids of at least one")
    if min(ids) < 0 or max(ids) >= vocab_size:
        wrong = next(token for token in ids if not 0 <= token < vocab_size)
        raise ValueError(f"input_ids holds {wrong}, which is no token id; pass integers from 0 to {vocab_size - 1}")


def _out_of_range(tokenized: TokenizedGenerateReqInput, vocab_size: int) -> Iterator[str]:
    """Yield what no tensor of the scheduler can hold, or be drawn from: it would end, plain SGLang's too."""
    parameters, number = tokenized.sampling_params, tokenized.top_logprobs_num
    if tokenized.return_logprob and not 0 <= number <= vocab_size:
        yield f"top_logprobs_num={number} is out of range; pass 0 to {vocab_size}"
    for name in ("top_k", "min_new_tokens"):
        if (value := getattr(parameters, name)) > _INT32_MAX:
            yield f"sampling_params.{name}={value} is out of range; pass at most {_INT32_MAX}"
    for token, bias in (parameters.logit_bias or {}).items():
        if not bias <= _FLOAT32_MAX:  # NaN is refused, -inf forbids a token
            yield f"sampling_params.logit_bias of token {token} is {bias}; pass a number that float32 holds"


def _drop_unknown_labels(request: Any, manager: TokenizerManager) -> None:
    """Leave only labels that the metrics have, as SGLang does for those of a header; others would end the server."""
    if labels := getattr(request, "custom_labels", None):
        known = manager.server_args.tokenizer_metrics_allowed_custom_labels or ()
        request.custom_labels = {name: labels[name] for name in known if name in labels}


def _drop_impossible_stops(parameters: SamplingParams, vocab_size: int) -> None:
    """Leave only stop tokens that can come.

    SGLang looks others up in a row of the vocabulary if any request of the batch asks for a minimum length, and ends.
    """
    if stops := parameters.stop_token_ids:
        parameters.stop_token_ids = {token for token in stops if 0 <= token < vocab_size}
