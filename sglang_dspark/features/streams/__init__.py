"""Streams: messages of one token each, which together are the text, though a step brings several tokens."""

from __future__ import annotations

from sglang_dspark.engine.feature import Feature

FEATURE = Feature(
    __name__,
    is_used=lambda args: True,
)
