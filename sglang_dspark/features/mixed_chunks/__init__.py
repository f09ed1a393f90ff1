"""Mixed chunks: while a prompt is encoded, each running request gets a token from the same forward at least."""

from sglang.srt.plugins.hook_registry import HookType

from sglang_dspark.engine.feature import Feature
from sglang_dspark.engine.hook_checks import Moment
from sglang_dspark.engine.launch.hook import Hook

FEATURE = Feature(
    __name__,
    is_used=lambda args: args.enable_mixed_chunk,
    hooks=(
        Hook(
            "sglang.srt.managers.scheduler_components.batch_result_processor.SchedulerBatchResultProcessor.process_batch_result_prefill",
            HookType.BEFORE,
            "features.mixed_chunks.results.count_running",
            "any_worker",
            "SGLang counts a step for running requests in the results of decode steps alone",
        ),
        Hook(
            "sglang.srt.managers.scheduler.Scheduler.is_disable_overlap_for_batch",
            HookType.AROUND,
            "features.mixed_chunks.results.wait_for_grammars",
            "any_worker",
            "under overlap SGLang would launch a mixed step while grammars lack the tokens of the step before",
            Moment.SOME_TIME,  # under overlap
        ),
        Hook(
            "sglang.srt.managers.scheduler.Scheduler._get_new_batch_prefill_raw",
            HookType.AROUND,
            "features.mixed_chunks.gap.bound_chunk",
            "any_worker",
            "SGLang's chunks have one size, whatever they take, and leave prompts none of it if as many requests run",
        ),
    ),
    checks="checks.CHECKS",
    part="gap.BoundedGaps.of",
)
