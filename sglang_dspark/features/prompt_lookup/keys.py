"""Keys of the field ``speculation`` by which a request says where candidates come from: checked, and read."""

from __future__ import annotations

import json
from collections.abc import Collection
from functools import lru_cache
from hashlib import blake2b
from itertools import groupby
from typing import TYPE_CHECKING, Annotated, Literal, Self, get_args

import numpy as np
from msgspec import Meta, Struct
from msgspec.structs import replace

from sglang_dspark.config import flag_name
from sglang_dspark.declared import int_range, truncate
from sglang_dspark.engine.feature import RequestKeys
from sglang_dspark.engine.request_options import MOST_DRAFTS, asked_for, kept_by_request
from sglang_dspark.engine.server import DSparkServer, OtherServer, speculating
from sglang_dspark.engine.sglang_types import Req, TokenizerManager
from sglang_dspark.errors import best_effort

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


Preset = Literal["auto", "none", "summarization", "classification"]
PRESETS: tuple[Preset, ...] = get_args(Preset)
AUTO, NO_PRESET, SUMMARIZATION, CLASSIFICATION = PRESETS
NAMING: tuple[Preset, ...] = (SUMMARIZATION, CLASSIFICATION)
"""Presets whose candidates are drafted, whatever others have been worth."""

COUNTS = "dspark_prediction"
"""Of SGLang's ``customized_info``: for each output token, predicted tokens accepted and rejected up to there."""

Tokens = tuple[int, ...]


MAX_LABEL_TOKENS = 16384
"""Of all labels of a request: the scheduler takes milliseconds to read them, once for equal labels."""
_MOST_CANDIDATES = 1000
_LONGEST_CANDIDATE = 200  # bytes
_LONGEST_CANDIDATES = 32768  # bytes in all: the front end serves no other request while it tokenizes them
_LONGEST_PREDICTION = 131072  # bytes
_MOST_PREDICTED = 32768  # tokens
_LONGEST_KEY = 256

# Which presets read a key; given without one of them, it would have no effect.
_READERS = {
    "min_ngram": (SUMMARIZATION,),
    "max_ngram": (SUMMARIZATION,),
    "max_draft": NAMING,
    "candidates": (CLASSIFICATION,),
    "prediction": (AUTO,),
    "cache": (AUTO, SUMMARIZATION),
}

Ngram = Annotated[int, int_range(1, 8)]  # as many tokens as a search compares
Labels = Annotated[
    tuple[Annotated[str, Meta(pattern=r"\S")], ...],
    Meta(
        min_length=1,
        max_length=_MOST_CANDIDATES,
        description=f"must be a list of 1 to {_MOST_CANDIDATES} strings that are not blank",
    ),
]


class TextPart(Struct, tag_field="type", tag="text"):
    """A part of a predicted text, in OpenAI's form."""

    text: str


class Content(Struct, tag_field="type", tag="content"):
    """A predicted text, in OpenAI's form."""

    content: str | tuple[TextPart, ...]

    @property
    def text(self) -> str:
        """Return it as a whole."""
        return self.content if isinstance(self.content, str) else "".join(part.text for part in self.content)


Prediction = Annotated[
    Content,
    Meta(
        description='must be {"type": "content", "content": TEXT} with a string, or a list of '
        '{"type": "text", "text": TEXT}'
    ),
]
Key = Annotated[
    str,
    Meta(
        pattern=rf"^[^\ud800-\udfff]{{1,{_LONGEST_KEY}}}\Z",
        description=f"must be a string of 1 to {_LONGEST_KEY} characters that UTF-8 can encode",
    ),
]


class LookupKeys(RequestKeys, frozen=True, omit_defaults=True):
    """Say where candidates of a request come from.

    Attributes:
        preset: where drafts come from: the drafter, with which candidates from the text compete (auto); only the
            drafter (none); or, where there are candidates, the text itself (summarization), or the labels of
            ``candidates`` (classification).
        min_ngram, max_ngram: lengths of the suffix that summarization looks up, the longest first.
        max_draft: most candidates that are drafted per step; None leaves it to the server.
        candidates: labels that the answer may consist of.
        prediction: the text that the answer is expected to be; None for none.
        cache: key under which the answer is kept, and under which earlier ones are looked up; None for neither.
        labels: tokens of every spelling of every label, which travel in place of ``candidates``.
        predicted: tokens of the prediction, in parts between those that the target does not have; they travel in its
            place.
    """

    MADE = frozenset({"labels", "predicted"})

    preset: Preset = "auto"
    min_ngram: Ngram = 3
    max_ngram: Ngram = 5
    max_draft: Annotated[int, int_range(1, MOST_DRAFTS)] | None = None
    candidates: Labels = ()
    prediction: Prediction | None = None
    cache: Key | None = None
    labels: tuple[Tokens, ...] = ()
    predicted: tuple[Tokens, ...] = ()

    @property
    def names_drafts(self) -> bool:
        """Return whether candidates are drafted whatever others have been worth."""
        return self.preset in NAMING or bool(self.predicted)

    @classmethod
    def unserved(cls, server: DSparkServer | OtherServer) -> Collection[str]:
        if not server.takes_candidates:
            return tuple(cls.key_types())
        return () if server.config.answer_cache else ("cache",)

    def for_scheduler(self, given: Collection[str], manager: TokenizerManager) -> Self:
        self._check_together(given)
        server = speculating(manager.server_args)
        assert server is not None, "requests of other servers are not checked"
        named = [f'preset="{self.preset}"'] if self.preset in NAMING else []
        named += ["prediction"] if self.prediction is not None else []
        if named and not server.takes_candidates:
            raise ValueError(
                f"speculation.{named[0]} is not served by SGLang's own worker; drop the key, or start the "
                "server with --speculative-dspark-engine plugin if that serves the target"
            )
        if self.cache is not None and server.config.answer_cache is None:
            raise ValueError(
                f"speculation.cache={truncate(self.cache)} needs a server that keeps answers; start this one with "
                f"{flag_name('answer_cache')}, or drop the key"
            )
        labels, predicted = self._labels(manager), self._predicted(manager)
        return replace(self, candidates=(), prediction=None, labels=labels, predicted=predicted)

    def _check_together(self, given: Collection[str]) -> None:
        for key, presets in _READERS.items():
            if key in given and self.preset not in presets:
                raise ValueError(
                    f"speculation.{key} belongs to the preset {' or '.join(presets)}, but speculation.preset is "
                    f'"{self.preset}"; change the preset or drop the key'
                )
        if self.min_ngram > self.max_ngram:
            raise ValueError(
                f"speculation.min_ngram={self.min_ngram} exceeds speculation.max_ngram={self.max_ngram}; "
                "lower the one or raise the other"
            )
        if self.preset == CLASSIFICATION and not self.candidates:
            raise ValueError(
                'speculation.candidates is missing: the preset classification needs the labels, e.g. ["yes", "no"]'
            )

    def _labels(self, manager: TokenizerManager) -> tuple[Tokens, ...]:
        if self.preset != CLASSIFICATION:
            return ()
        _check_sizes(self.candidates)
        if manager.tokenizer is None:
            raise ValueError("speculation.candidates needs a tokenizer; start the server without --skip-tokenizer-init")
        return _label_tokens(manager.tokenizer, self.candidates, manager.model_config.vocab_size)

    def _predicted(self, manager: TokenizerManager) -> tuple[Tokens, ...]:
        text = "" if self.prediction is None else self.prediction.text
        if not text:
            return ()
        try:
            size = len(text.encode())
        except UnicodeEncodeError:
            raise ValueError(
                f"speculation.prediction must be text that UTF-8 can encode, not {truncate(text)}"
            ) from None
        if size > _LONGEST_PREDICTION:
            raise ValueError(
                f"speculation.prediction has {size} bytes; pass at most {_LONGEST_PREDICTION}, the part that is most "
                "likely to come"
            )
        if manager.tokenizer is None:
            raise ValueError("speculation.prediction needs a tokenizer; start the server without --skip-tokenizer-init")
        return _predicted_tokens(manager.tokenizer, text, manager.model_config.vocab_size)


def _check_sizes(labels: tuple[str, ...]) -> None:
    try:
        sizes = [len(label.encode()) for label in labels]
    except UnicodeEncodeError:
        raise ValueError(f"speculation.candidates must be text that UTF-8 can encode, not {truncate(labels)}") from None
    if max(sizes) > _LONGEST_CANDIDATE or sum(sizes) > _LONGEST_CANDIDATES:
        raise ValueError(
            f"speculation.candidates must be strings of at most {_LONGEST_CANDIDATE} bytes, and {_LONGEST_CANDIDATES} "
            f"in all, not {truncate(labels)}"
        )


@lru_cache(maxsize=4)  # the requests of a batch have the same candidates
def _label_tokens(
    tokenizer: PreTrainedTokenizerBase, candidates: tuple[str, ...], vocab_size: int
) -> tuple[Tokens, ...]:
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


@lru_cache(maxsize=4)  # the samples of a request have the same prediction
def _predicted_tokens(tokenizer: PreTrainedTokenizerBase, text: str, vocab_size: int) -> tuple[Tokens, ...]:
    """Return the tokens of a predicted text, in parts between those that the target does not have.

    Raises:
        ValueError: there are too many.
    """
    [tokens] = tokenizer([text], add_special_tokens=False)["input_ids"]
    if len(tokens) > _MOST_PREDICTED:
        raise ValueError(
            f"speculation.prediction has {len(tokens)} tokens; pass at most {_MOST_PREDICTED}, the part that is most "
            "likely to come"
        )
    parts = groupby(tokens, key=lambda token: token < vocab_size)
    return tuple(tuple(part) for is_known, part in parts if is_known)


def _spellings(label: str) -> list[str]:
    """Return a label as it stands, and after a space, as it is tokenised after other text."""
    return [label] if label[0].isspace() else [label, f" {label}"]


_NOTHING = LookupKeys()


@best_effort("presets", instead=lambda req: _NOTHING)
@kept_by_request
def lookup_options(req: Req) -> LookupKeys:
    """Return the options of a scheduler-side request."""
    return asked_for(req, "prompt_lookup", LookupKeys)


def answer_key(req: Req, *, by_prompt: bool) -> str | bytes:
    """Return the key under which a scheduler-side request finds answers and leaves its own; empty for none.

    Args:
        by_prompt: whether its prompt, its adapter and what keeps its prefixes apart (``extra_key``, ``cache_salt``) are
            the key where the client has sent none. It is a digest, in bytes: no client can send it for a prompt that
            the client does not know.
    """
    options = lookup_options(req)
    if options.cache or not by_prompt or options.preset not in (AUTO, SUMMARIZATION):
        return options.cache or ""
    return _prompt_key(req)


@kept_by_request
def _prompt_key(req: Req) -> bytes:
    prompt = np.asarray(req.origin_input_ids, dtype=np.int64).tobytes()
    apart = json.dumps([req.lora_id, req.extra_key, req.cache_salt]).encode()
    return blake2b(prompt + apart, digest_size=16).digest()
