"""Checks requests in the process that tokenizes them, on their way to the scheduler, once.

What DSPARK does not serve, or what the scheduler would not survive, is refused; the field ``speculation`` is read.
"""

from __future__ import annotations

import copy
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from contextvars import ContextVar
from typing import Any

import msgspec
from msgspec import Struct
from sglang.srt.managers.io_struct import (
    GenerateReqInput,
    TokenizedEmbeddingReqInput,
    TokenizedGenerateReqInput,
    msgpack_decode,
    msgpack_encode,
)
from sglang.srt.plugins.hook_registry import HookType

from sglang_dspark.declared import field_types, truncate
from sglang_dspark.draft.families import family_of
from sglang_dspark.engine.feature import RequestKeys, all_features
from sglang_dspark.engine.hooks import Moment, hook
from sglang_dspark.engine.request_options import CORE_KEYS, KEY, Speculation, checked_keys
from sglang_dspark.engine.server import DSparkServer, speculating
from sglang_dspark.engine.sglang_types import ModelConfig, SamplingParams, TokenizerManager

ASKED: ContextVar[str | None] = ContextVar("speculation", default=None)
"""The field of the HTTP request that is being answered, as JSON text; None if there is none."""


def settle(manager: TokenizerManager, parameters: SamplingParams) -> None:
    """Put the checked options that the scheduler reads among ``custom_params``.

    Args:
        parameters: the request's own ``SamplingParams``. Its ``custom_params`` may belong to several requests: they
            are replaced and not changed. Our key among them holds what a program asks for; :data:`ASKED` wins over it.

    Raises:
        ValueError: names the key, its value and the remedy.
    """
    custom_params, asked = parameters.custom_params, ASKED.get()
    if custom_params is None and asked is not None:
        custom_params = {}
    if not isinstance(custom_params, Mapping) or (asked is None and KEY not in custom_params):
        return
    kept = {key: value for key, value in custom_params.items() if key != KEY}
    options = _options(_read(custom_params[KEY] if asked is None else asked), manager)
    if options:
        # A scalar: values of custom_params that are deeper than a flat list do not reach the scheduler.
        kept[KEY] = msgspec.json.encode(options).decode()
    parameters.custom_params = kept


def known_keys() -> dict[str, Any]:
    """Return the types of all keys, those of features after the core's."""
    found = field_types(Speculation)
    for _, keys in _keys_of_features():
        found |= keys.key_types()
    return found


def _keys_of_features() -> Iterator[tuple[str, type[RequestKeys]]]:
    for feature in all_features():
        if feature.request_keys is not None:
            yield feature.name, feature.request_keys


def _read(given: Any) -> dict[str, Any]:
    """Return the keys that the field gives.

    Raises:
        ValueError: it cannot be read, or a value is bad.
    """
    try:
        if isinstance(given, str):
            with suppress(ValueError):  # another text of the client's own is no object either
                given = json.loads(given)
        return checked_keys(given, known_keys())
    except RecursionError:
        raise ValueError("speculation is nested too deeply; its values are scalars and one list of strings") from None


def _options(given: Mapping[str, Any], manager: TokenizerManager) -> dict[str, Struct]:
    """Return what the scheduler reads of these keys, by feature; nothing of those that ask for nothing.

    Raises:
        ValueError: keys do not go together, or the server does not serve one.
    """
    asked: dict[str, Struct] = {}
    for name, kind in _keys_of_features():
        keys = kind(**{key: given[key] for key in kind.key_types() if key in given}).for_scheduler(given, manager)
        if keys != kind():
            asked[name] = keys
    field = Speculation(**{key: given[key] for key in field_types(Speculation) if key in given})
    server = speculating(manager.server_args)
    assert server is not None, "requests of other servers are not checked"
    if field.confidence_threshold is not None and not server.has_confidence_head:
        raise ValueError(
            "speculation.confidence_threshold needs a drafter with a confidence head, which this server does not have; "
            "use speculation.max_verify or drop the key"
        )
    return asked if field == Speculation() else {CORE_KEYS: field, **asked}


_OTHER_LOGPROBS = "DSPARK returns log-probabilities only in the usual form"
_ONE_BY_ONE = "it reads the tokens before each new one, and SGLang does not show it the drafts among them"
REFUSED_FIELDS = {
    "custom_logit_processor": _ONE_BY_ONE,
    "input_embeds": "the drafter needs the token ids of a prompt",
    "positional_embed_overrides": "the drafter needs the token ids of a prompt",
    "return_indexer_topk": "SGLang would return those of rejected drafts, too",
    "multi_item_delimiter_indices": "it scores a prompt, which a server without DSPARK does as fast",
    "watermark": _ONE_BY_ONE,
    "return_sampling_mask": "DSPARK samples without a mask that it could return",
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
    settle(manager, tokenized.sampling_params)
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
            yield f"DSPARK does not serve {name} yet, only text and images; use a server without DSPARK"


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


@hook(
    "sglang.srt.managers.tokenizer_manager.TokenizerManager._send_one_request",
    HookType.BEFORE,
    where="front_end",
    reason="SGLang sends the n samples of a request with one seed; seeds are served here, so all would have one text",
    by=Moment.SOME_TIME,
)
def seed_each(
    manager: TokenizerManager,
    tokenized: TokenizedGenerateReqInput | TokenizedEmbeddingReqInput,
    *args: object,
    **kwargs: object,
) -> None:
    """Give sample k of ``n`` the seed of the request plus k.

    SGLang sends ``n`` requests that share one ``SamplingParams``, and so would draw the same text ``n`` times.
    """
    shared = getattr(tokenized, "sampling_params", None)
    if shared is not None and getattr(shared, "sampling_seed", None) is not None:
        tokenized.sampling_params = copy.copy(shared)
        # Of the next one. It stays a signed number of 64 bits, as which all seeds are read.
        shared.sampling_seed = (shared.sampling_seed + 1 + 2**63) % 2**64 - 2**63
