"""Replicas of a server (``--dp-size``): none goes on without the others."""

from sglang_dspark.engine.feature import Feature

FEATURE = Feature(
    __name__,
    is_used=lambda args: args.dp_size > 1,
    hooks={"children": ("watch",)},
    checks="checks.CHECKS",
)
