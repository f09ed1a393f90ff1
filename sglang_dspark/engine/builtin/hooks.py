"""Lists the patches by which SGLang's own DSPARK worker decodes by our schedule."""

from __future__ import annotations

from sglang.srt.plugins.hook_registry import HookType

from sglang_dspark.engine.hook_checks import Moment
from sglang_dspark.engine.launch.hook import Hook

_OWN = "sglang.srt.speculative.dspark_components"

SCHEDULED_HOOKS = (
    Hook(
        "schedule-own-worker",
        "sglang.srt.speculative.spec_info.SpeculativeAlgorithm.create_worker",
        HookType.BEFORE,
        "engine.launch.resolution.schedule_own_worker",
        "own_worker",
        "a scheduler process hears of its worker here first",
        Moment.SOME_TIME,  # called in the scheduler alone
    ),
    Hook(
        "start-schedule",
        f"{_OWN}.dspark_worker_v2.DSparkWorkerV2.init_cuda_graphs",
        HookType.AFTER,
        "engine.builtin.handlers.start",
        "scheduled",
        "step times are measured on the worker's own steps, when its graphs are captured",
    ),
    Hook(
        "schedule-step",
        f"{_OWN}.dspark_worker_v2.DSparkWorkerV2._forward_decode",
        HookType.AROUND,
        "engine.builtin.handlers.decode",
        "scheduled",
        "the schedule decides a step before anything of it is drafted, and notes what it did",
    ),
    Hook(
        "note-prefill",
        f"{_OWN}.dspark_worker_v2.DSparkWorkerV2._forward_prefill",
        HookType.BEFORE,
        "engine.builtin.handlers.before_prefill",
        "scheduled",
        "the time between two steps is not a step's if a prefill lies between them",
    ),
    Hook(
        "propose-or-not",
        f"{_OWN}.dspark_draft.DraftBlockProposer.propose",
        HookType.AROUND,
        "engine.builtin.handlers.propose",
        "scheduled",
        "SGLang's own DSPARK drafts in every step; its planner reads confidences that the schedule replaces",
    ),
    Hook(
        "lay-out-rows",
        f"{_OWN}.dspark_planner.DSparkVerifyPlanner.schedule_layout",
        HookType.REPLACE,
        "engine.builtin.handlers.lay_out",
        "scheduled",
        "the schedule decides how many drafts of each request are verified",
    ),
    Hook(
        "copy-record",
        "sglang.srt.managers.utils.GenerationBatchResult.copy_to_cpu",
        HookType.AROUND,
        "engine.builtin.handlers.copy_to_cpu",
        "scheduled",
        "lengths and confidences come to the host with the tokens of their step",
        Moment.SOME_TIME,  # under overlap
    ),
    Hook(
        "observe-own-results",
        "sglang.srt.managers.scheduler_components.batch_result_processor.SchedulerBatchResultProcessor._resolve_spec_v2_tokens",
        HookType.AROUND,
        "engine.builtin.handlers.observe",
        "scheduled",
        "there the schedule learns what became of the drafts",
    ),
)
