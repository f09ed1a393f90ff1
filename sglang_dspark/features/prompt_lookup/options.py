"""What a request asks of prompt lookup, as it travels to the scheduler."""

from __future__ import annotations

from typing import Any, Literal, get_args

import msgspec
from msgspec import Struct

from sglang_dspark.engine.scheduler.request_options import request_options
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
def lookup_options(req: Any) -> LookupOptions:
    """Return the options of a scheduler-side request, which are read once."""
    if not hasattr(req, "dspark_lookup"):
        asked = request_options(req).of_features.get("prompt_lookup")
        req.dspark_lookup = _NOTHING if asked is None else msgspec.json.decode(asked, type=LookupOptions)
    options: LookupOptions = req.dspark_lookup
    return options
