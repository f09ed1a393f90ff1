"""Replicas of a server (``--dp-size``): none goes on without the others."""

from sglang_dspark.engine.feature import Feature
from sglang_dspark.features.replicas.checks import CHECKS

FEATURE = Feature(
    __name__,
    is_used=lambda args: args.dp_size > 1,
    checks=CHECKS,
)
