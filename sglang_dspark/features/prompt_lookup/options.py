"""Holds what a request asks of prompt lookup, as it travels to the scheduler."""

from __future__ import annotations

from hashlib import blake2b
from typing import Literal, get_args

import msgspec
import numpy as np
from msgspec import Struct

from sglang_dspark.engine.sglang_types import Req
from sglang_dspark.engine.step_control import kept_by_request, request_options
from sglang_dspark.fence import fenced

Preset = Literal["auto", "none", "summarization", "classification"]
PRESETS: tuple[Preset, ...] = get_args(Preset)
AUTO, NO_PRESET, SUMMARIZATION, CLASSIFICATION = PRESETS
NAMING: tuple[Preset, ...] = (SUMMARIZATION, CLASSIFICATION)
"""Presets whose candidates are drafted, whatever others have been worth."""

COUNTS = "dspark_prediction"
"""Of SGLang's ``customized_info``: for each output token, predicted tokens accepted and rejected up to there."""

Tokens = tuple[int, ...]


class LookupOptions(Struct, frozen=True, omit_defaults=True):
    """Checked options of a request. The defaults ask for nothing.

    Attributes:
        preset, min_ngram, max_ngram, max_draft: as in :class:`~.keys.LookupKeys`.
        labels: tokens of every spelling of every label.
        predicted: tokens of the prediction, in parts between those that the target does not have.
        cache: as in :class:`~.keys.LookupKeys`; empty for none.
    """

    preset: Preset = AUTO
    min_ngram: int = 3
    max_ngram: int = 5
    max_draft: int | None = None
    labels: tuple[Tokens, ...] = ()
    predicted: tuple[Tokens, ...] = ()
    cache: str = ""

    @property
    def names_drafts(self) -> bool:
        """Return whether candidates are drafted whatever others have been worth."""
        return self.preset in NAMING or bool(self.predicted)


_NOTHING = LookupOptions()


@fenced("presets", instead=lambda req: _NOTHING)
@kept_by_request
def lookup_options(req: Req) -> LookupOptions:
    """Return the options of a scheduler-side request."""
    asked = request_options(req).of_features.get("prompt_lookup")
    return _NOTHING if asked is None else msgspec.json.decode(asked, type=LookupOptions)


def answer_key(req: Req, *, by_prompt: bool) -> str | bytes:
    """Return the key under which a scheduler-side request finds answers and leaves its own; empty for none.

    Args:
        by_prompt: whether its prompt and adapter are the key where the client has sent none. It is a digest, in bytes:
            no client can send it for a prompt that the client does not know.
    """
    options = lookup_options(req)
    if options.cache or not by_prompt or options.preset not in (AUTO, SUMMARIZATION):
        return options.cache
    return _prompt_key(req)


@kept_by_request
def _prompt_key(req: Req) -> bytes:
    prompt = np.asarray(req.origin_input_ids, dtype=np.int64).tobytes()
    return blake2b(prompt + (req.lora_id or "").encode(), digest_size=16).digest()
