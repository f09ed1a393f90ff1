"""Ends of texts: a step brings several tokens, and the first of several ends among them counts."""

from sglang_dspark.engine.feature import Feature

FEATURE = Feature(__name__, is_used=lambda args: True, part="first_end.Ends.of")
