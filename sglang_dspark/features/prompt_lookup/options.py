"""Names what a request may ask of prompt lookup, and what its answer says of it."""

from __future__ import annotations

from typing import Literal, get_args

Preset = Literal["auto", "none", "summarization", "classification"]
PRESETS: tuple[Preset, ...] = get_args(Preset)
AUTO, NO_PRESET, SUMMARIZATION, CLASSIFICATION = PRESETS
NAMING: tuple[Preset, ...] = (SUMMARIZATION, CLASSIFICATION)
"""Presets whose candidates are drafted, whatever others have been worth."""

COUNTS = "dspark_prediction"
"""Of SGLang's ``customized_info``: for each output token, predicted tokens accepted and rejected up to there."""

Tokens = tuple[int, ...]
