"""Short prompts: their tokens are verified like drafts, by the CUDA graphs of decode steps, in place of a prefill."""

from __future__ import annotations

from sglang.srt.plugins.hook_registry import HookType

from sglang_dspark.engine.compat.arguments import attached
from sglang_dspark.engine.feature import Feature
from sglang_dspark.engine.hook_checks import Moment
from sglang_dspark.engine.launch.hook import Hook
from sglang_dspark.engine.launch_state import DSparkServer
from sglang_dspark.engine.sglang_types import ServerArgs
from sglang_dspark.gpu_paths import is_on


def verifies_prompts(args: ServerArgs) -> bool:
    """Return whether the operator asks for it. On a CPU it is slower, and no GPU has run it."""
    server = attached(args)
    if not isinstance(server, DSparkServer):
        return False
    if (rows := server.config.prompt_rows) is not None:
        return rows > 0
    return args.device != "cpu" and is_on("prompt-rows", server.config.unproven, on_gpu=True)


FEATURE = Feature(
    __name__,
    is_used=verifies_prompts,
    hooks=(
        Hook(
            "sglang.srt.managers.schedule_batch.ScheduleBatch.mix_with_running",
            HookType.AROUND,
            "features.short_prompts.riding.ride_or_mix",
            "scheduler",
            "beside a prompt SGLang gives running requests one token; drafts of these fit into its verification",
            Moment.SOME_TIME,  # with mixed chunks
        ),
        Hook(
            "sglang.srt.managers.scheduler.Scheduler.get_new_batch_prefill",
            HookType.AFTER,
            "features.short_prompts.riding.keep_apart",
            "scheduler",
            "running requests that are verified beside prompts stay a batch of their own",
            Moment.SOME_TIME,
        ),
        Hook(
            "sglang.srt.managers.scheduler.Scheduler.process_batch_result",
            HookType.AFTER,
            "features.short_prompts.riding.process_running",
            "scheduler",
            "a step beside prompts has a result of its own behind theirs",
        ),
    ),
    part="served.ShortPrompts.of",
)
