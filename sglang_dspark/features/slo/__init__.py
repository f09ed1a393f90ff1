"""SLOs: a request may name a time per token and a weight, and gets more of the drafts when it is late."""

from sglang_dspark.engine.feature import Feature

FEATURE = Feature(
    __name__,
    is_used=lambda args: True,
    hooks={"front_end": ("keys",)},
    request_keys="keys.SloKeys",
    part="served.Slos.of",
)
