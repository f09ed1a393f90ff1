"""The request field ``speculation``: checked here, once, on its way to the scheduler."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from contextlib import suppress
from contextvars import ContextVar
from functools import lru_cache

import msgspec
from transformers import PreTrainedTokenizerBase

from sglang_dspark.config import flag_name
from sglang_dspark.declared import truncate
from sglang_dspark.engine.compat.arguments import speculating
from sglang_dspark.engine.sglang_types import SamplingParams, TokenizerManager
from sglang_dspark.speculation import CLASSIFICATION, COPYING, KEY, RequestOptions, Speculation

ASKED: ContextVar[str | None] = ContextVar("speculation", default=None)
"""The field of the HTTP request that is being answered, as JSON text; None if there is none."""
MAX_LABEL_TOKENS = 16384
"""Of all labels of a request: the scheduler takes milliseconds to read them, once for equal labels."""


def settle(manager: TokenizerManager, parameters: SamplingParams) -> None:
    """Put the checked options that the scheduler reads among ``custom_params``.

    Args:
        manager: SGLang's ``TokenizerManager``.
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
    field = _parsed(custom_params[KEY] if asked is None else asked)
    server = speculating(manager.server_args)
    assert server is not None, "requests of other servers are not checked"
    if field.preset in COPYING and not server.presets:
        raise ValueError(
            f'speculation.preset="{field.preset}" is not served by SGLang\'s own worker; drop the key, or start the '
            "server with --speculative-dspark-engine plugin if that serves the target"
        )
    if field.confidence_threshold is not None and not server.has_confidence_head:
        raise ValueError(
            "speculation.confidence_threshold needs a drafter with a confidence head, which this server does not have; "
            "use speculation.max_verify or drop the key"
        )
    if field.cache is not None and server.config.answer_cache is None:
        raise ValueError(
            f"speculation.cache={truncate(field.cache)} needs a server that keeps answers; start this one with "
            f"{flag_name('answer_cache')}, or drop the key"
        )
    if field.recorded:
        _check_recorded(field.recorded, manager.model_config.vocab_size)
    options = field.for_scheduler(_labels(manager, field))
    if options != RequestOptions():
        # A scalar: values of custom_params that are deeper than a flat list do not reach the scheduler.
        kept[KEY] = msgspec.json.encode(options).decode()
    parameters.custom_params = kept


def _parsed(given: object) -> Speculation:
    try:
        if isinstance(given, str):
            with suppress(ValueError):  # another text of the client's own is no object either
                given = json.loads(given)
        return Speculation.parse(given)
    except RecursionError:
        raise ValueError("speculation is nested too deeply; its values are scalars and one list of strings") from None


def _check_recorded(recorded: Sequence[int], vocab_size: int) -> None:
    if (largest := max(recorded)) >= vocab_size:
        raise ValueError(
            f"speculation.recorded holds {largest}, which is no token id; pass integers below {vocab_size}"
        )


def _labels(manager: TokenizerManager, field: Speculation) -> tuple[tuple[int, ...], ...]:
    if field.preset != CLASSIFICATION:
        return ()
    if manager.tokenizer is None:
        raise ValueError("speculation.candidates needs a tokenizer; start the server without --skip-tokenizer-init")
    return _label_tokens(manager.tokenizer, field.candidates, manager.model_config.vocab_size)


@lru_cache(maxsize=4)  # the requests of a batch have the same candidates
def _label_tokens(
    tokenizer: PreTrainedTokenizerBase, candidates: tuple[str, ...], vocab_size: int
) -> tuple[tuple[int, ...], ...]:
    """Return the tokens of every spelling of every label.

    Raises:
        ValueError: there are too many, a label has none, or one that the target does not have.
    """
    texts = [text for label in candidates for text in _spellings(label)]
    encoded = map(tuple, tokenizer(texts, add_special_tokens=False)["input_ids"])
    labels = dict(zip(encoded, texts, strict=True))
    for tokens, text in labels.items():
        if not tokens:
            raise ValueError(f"speculation.candidates holds {truncate(text)}, which has no token; drop it")
        if (largest := max(tokens)) >= vocab_size:
            raise ValueError(
                f"speculation.candidates holds {truncate(text)}, whose token {largest} the target does not have (its "
                f"ids lie below {vocab_size}); drop it"
            )
    number = sum(map(len, labels))
    if number > MAX_LABEL_TOKENS:
        raise ValueError(
            f"speculation.candidates are {number} tokens, each label counted with and without a space before it; "
            f"pass fewer or shorter labels, of at most {MAX_LABEL_TOKENS} tokens in all"
        )
    return tuple(labels)


def _spellings(label: str) -> list[str]:
    """Return a label as it stands, and after a space, as it is tokenised behind other text."""
    return [label] if label[0].isspace() else [label, f" {label}"]
