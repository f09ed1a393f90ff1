"""Penalties, minimum lengths, biases and grammars: each row of a verification knows the drafts before it."""

from sglang_dspark.engine.feature import Feature

FEATURE = Feature(__name__, is_used=lambda args: True, part="adjuster.Adjustments.of")
