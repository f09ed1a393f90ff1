"""Mixed chunks: while a prompt is encoded, each running request gets a token from the same forward at least."""

from sglang_dspark.engine.feature import Feature

FEATURE = Feature(
    __name__,
    is_used=lambda args: args.enable_mixed_chunk,
    hooks={
        "any_worker": (
            "results",
            "gap",
        )
    },
    checks="checks.CHECKS",
    part="gap.BoundedGaps.of",
)
