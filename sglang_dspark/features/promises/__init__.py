"""Promises: a request may name a time per token and one to its first, and is served sooner where it would miss them."""

from sglang_dspark.engine.feature import Feature

FEATURE = Feature(
    __name__,
    is_used=lambda args: True,
    hooks={"scheduler": ("starting",)},
    request_keys="keys.PromiseKeys",
    part="served.Promises.of",
)
