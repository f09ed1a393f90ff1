"""Live vocabulary: the list of tokens that a drafter proposes follows what answers consist of."""

from sglang_dspark.engine.feature import Feature

FEATURE = Feature(
    __name__,
    is_used=lambda args: args.speculative_dspark_draft_vocabulary is not None,
    part="served.LiveVocabulary.of",
)
