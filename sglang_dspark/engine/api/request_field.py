"""The request field ``speculation``: checked here, once, on its way to the scheduler."""

from __future__ import annotations

import json
from collections.abc import Mapping
from contextlib import suppress
from contextvars import ContextVar
from typing import Any

import msgspec
from msgspec import Raw

from sglang_dspark.declared import field_types
from sglang_dspark.engine.compat.arguments import speculating
from sglang_dspark.engine.feature import all_features
from sglang_dspark.engine.sglang_types import SamplingParams, TokenizerManager
from sglang_dspark.speculation import KEY, RequestOptions, Speculation, checked

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
    if options != RequestOptions():
        # A scalar: values of custom_params that are deeper than a flat list do not reach the scheduler.
        kept[KEY] = msgspec.json.encode(options).decode()
    parameters.custom_params = kept


def known_keys() -> dict[str, Any]:
    """Return the types of all keys, those of features behind the core's."""
    kinds: list[type] = [
        Speculation,
        *(feature.load_request_keys() for feature in all_features() if feature.request_keys),
    ]
    return {key: kind for keys in kinds for key, kind in field_types(keys).items()}


def _read(given: Any) -> dict[str, Any]:
    """Return the keys that the field gives.

    Raises:
        ValueError: it cannot be read, or a value is bad.
    """
    try:
        if isinstance(given, str):
            with suppress(ValueError):  # another text of the client's own is no object either
                given = json.loads(given)
        return checked(given, known_keys())
    except RecursionError:
        raise ValueError("speculation is nested too deeply; its values are scalars and one list of strings") from None


def _options(given: Mapping[str, Any], manager: TokenizerManager) -> RequestOptions:
    """Return what the scheduler reads of these keys.

    Raises:
        ValueError: keys do not go together, or the server does not serve one.
    """
    of_features = {}
    for feature in all_features():
        if feature.request_keys:
            keys = feature.load_request_keys()
            asked = keys(**{key: given[key] for key in field_types(keys) if key in given}).for_scheduler(given, manager)
            if asked is not None:
                of_features[feature.name] = Raw(msgspec.json.encode(asked))
    field = Speculation(**{key: given[key] for key in field_types(Speculation) if key in given})
    server = speculating(manager.server_args)
    assert server is not None, "requests of other servers are not checked"
    if field.confidence_threshold is not None and not server.has_confidence_head:
        raise ValueError(
            "speculation.confidence_threshold needs a drafter with a confidence head, which this server does not have; "
            "use speculation.max_verify or drop the key"
        )
    return field.for_scheduler(of_features)
