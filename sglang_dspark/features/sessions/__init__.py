"""Sessions: what a turn leaves behind for the next one is what was shown, and has K/V."""

from sglang_dspark.engine.feature import Feature

FEATURE = Feature(
    __name__,
    is_used=lambda args: True,
)
