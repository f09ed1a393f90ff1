"""Log-probabilities of output tokens, of as many rows as each request verifies."""

from sglang_dspark.engine.feature import Feature

FEATURE = Feature(__name__, is_used=lambda args: True, part="served.Logprobs.of")
