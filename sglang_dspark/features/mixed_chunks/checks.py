"""Refuse a bound on gaps where no chunk can keep it."""

from sglang_dspark.config import flag_name
from sglang_dspark.engine.feature import Check, LaunchContext, Stage


def bound_without_chunks(context: LaunchContext) -> str | None:
    """Refuse a bound on gaps on a server whose prompts stop everything else."""
    args, bound = context.args, context.server.config.max_gap_ms
    if bound is None or (args.enable_mixed_chunk and args.chunked_prefill_size > 0):
        return None
    return (
        f"{flag_name('max_gap_ms')}={bound} cuts chunks of prompts that running requests wait for; pass "
        "--enable-mixed-chunk, and no --chunked-prefill-size of 0 or less"
    )


CHECKS = (Check("bound on gaps", Stage.FLAGS, bound_without_chunks),)
