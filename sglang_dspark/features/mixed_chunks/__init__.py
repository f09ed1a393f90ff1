"""Mixed chunks: while a prompt is encoded, each running request gets a token from the same forward at least."""

from sglang_dspark.engine.feature import Feature
from sglang_dspark.features.mixed_chunks.checks import CHECKS
from sglang_dspark.features.mixed_chunks.gap import BoundedGaps

FEATURE = Feature(
    __name__,
    is_used=lambda args: args.enable_mixed_chunk,
    checks=CHECKS,
    part=BoundedGaps.of,
)
