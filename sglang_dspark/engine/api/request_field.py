"""The request field ``speculation``: checked here, once, on its way to the scheduler."""

from __future__ import annotations

import json
from collections.abc import Mapping
from contextlib import suppress
from functools import lru_cache
from typing import Any

import msgspec

from sglang_dspark.engine.compat.arguments import attached
from sglang_dspark.engine.sglang_types import SamplingParams, TokenizerManager
from sglang_dspark.proposals.candidate_labels import spellings
from sglang_dspark.speculation import CLASSIFICATION, COPYING, KEY, RequestOptions, Speculation

MAX_LABEL_TOKENS = 16384
"""Of all labels of a request: the scheduler takes milliseconds to read them, once for equal labels."""


def settle(manager: TokenizerManager, parameters: SamplingParams) -> None:
    """Replace the field among ``custom_params`` by the checked options that the scheduler reads.

    Args:
        manager: SGLang's ``TokenizerManager``.
        parameters: the request's own ``SamplingParams``. Its ``custom_params`` may belong to several requests: they
            are replaced and not changed. Our key holds what a client has sent: the field as JSON text, where
            :class:`~sglang_dspark.engine.api.http.SpeculationMiddleware` has moved it there, or an object.

    Raises:
        ValueError: names the key, its value and the remedy.
    """
    custom_params = parameters.custom_params
    if not isinstance(custom_params, Mapping) or KEY not in custom_params:
        return
    kept = {key: value for key, value in custom_params.items() if key != KEY}
    field = _parsed(custom_params[KEY])
    server = attached(manager.server_args)
    if field.preset in COPYING and not server.presets:
        raise ValueError(
            f'speculation.preset="{field.preset}" is not served by SGLang\'s own worker; drop the key, or start the '
            "server with --speculative-dspark-engine plugin"
        )
    if field.confidence_threshold is not None and not server.has_confidence_head:
        raise ValueError(
            "speculation.confidence_threshold needs a drafter with a confidence head, which this server does not have; "
            "use speculation.max_verify or drop the key"
        )
    options = field.for_scheduler(_labels(manager.tokenizer, field))
    if options != RequestOptions():
        # A scalar: values of custom_params that are deeper than a flat list do not reach the scheduler.
        kept[KEY] = msgspec.json.encode(options).decode()
    parameters.custom_params = kept


def _parsed(given: Any) -> Speculation:
    try:
        if isinstance(given, str):
            with suppress(ValueError):  # another text of the client's own is no object either
                given = json.loads(given)
        return Speculation.parse(given)
    except RecursionError:
        raise ValueError("speculation is nested too deeply; its values are scalars and one list of strings") from None


def _labels(tokenizer: Any, field: Speculation) -> tuple[tuple[int, ...], ...]:
    if field.preset != CLASSIFICATION:
        return ()
    if tokenizer is None:
        raise ValueError("speculation.candidates needs a tokenizer; start the server without --skip-tokenizer-init")
    return _label_tokens(tokenizer, field.candidates)


@lru_cache(maxsize=4)  # the requests of a batch have the same candidates
def _label_tokens(tokenizer: Any, candidates: tuple[str, ...]) -> tuple[tuple[int, ...], ...]:
    """Return the tokens of every spelling of every label.

    Raises:
        ValueError: there are too many.
    """
    texts = [text for label in candidates for text in spellings(label)]
    labels = tuple(dict.fromkeys(map(tuple, tokenizer(texts, add_special_tokens=False)["input_ids"])))
    number = sum(map(len, labels))
    if number > MAX_LABEL_TOKENS:
        raise ValueError(
            f"speculation.candidates are {number} tokens, each label counted with and without a space before it; "
            f"pass fewer or shorter labels, of at most {MAX_LABEL_TOKENS} tokens in all"
        )
    return labels
