"""SGLang's own worker under our schedule, which decides what is verified, and whether anything is drafted.

``server.py`` is its start, ``driver.py`` its steps. By ``common_draws.py`` the worker as it comes accepts what ours
accepts in simulations.
"""

from sglang.srt.plugins.hook_registry import HookType

from sglang_dspark.engine.compat.arguments import speculating
from sglang_dspark.engine.feature import Feature
from sglang_dspark.engine.hook_checks import Moment
from sglang_dspark.engine.launch.hook import Hook
from sglang_dspark.engine.sglang_types import ServerArgs

_OWN = "sglang.srt.speculative.dspark_components"


def _decodes(args: ServerArgs) -> bool:
    server = speculating(args)
    return server is not None and server.engine == "scheduled"


FEATURE = Feature(
    __name__,
    is_used=_decodes,
    hooks=(
        Hook(
            "sglang.srt.speculative.spec_info.SpeculativeAlgorithm.create_worker",
            HookType.BEFORE,
            "features.builtin_worker.driver.install_hooks",
            "children",
            "a scheduler process hears of its worker here first",
            Moment.SOME_TIME,  # called in the scheduler alone
        ),
        Hook(
            f"{_OWN}.dspark_worker_v2.DSparkWorkerV2.init_cuda_graphs",
            HookType.AFTER,
            "features.builtin_worker.driver.start",
            "any_worker",
            "step times are measured on the worker's own steps, when its graphs are captured",
        ),
        Hook(
            f"{_OWN}.dspark_worker_v2.DSparkWorkerV2._forward_decode",
            HookType.AROUND,
            "features.builtin_worker.driver.decode",
            "any_worker",
            "the schedule decides a step before anything of it is drafted, and notes what it did",
        ),
        Hook(
            f"{_OWN}.dspark_worker_v2.DSparkWorkerV2._forward_prefill",
            HookType.BEFORE,
            "features.builtin_worker.driver.before_prefill",
            "any_worker",
            "the time between two steps is not a step's if a prefill lies between them",
        ),
        Hook(
            f"{_OWN}.dspark_draft.DraftBlockProposer.propose",
            HookType.AROUND,
            "features.builtin_worker.driver.propose",
            "any_worker",
            "SGLang's own worker drafts in every step; its planner reads confidences that the schedule replaces",
        ),
        Hook(
            f"{_OWN}.dspark_planner.DSparkVerifyPlanner.schedule_layout",
            HookType.REPLACE,
            "features.builtin_worker.driver.lay_out",
            "any_worker",
            "the schedule decides how many drafts of each request are verified",
        ),
        Hook(
            "sglang.srt.managers.utils.GenerationBatchResult.copy_to_cpu",
            HookType.AROUND,
            "features.builtin_worker.driver.copy_to_cpu",
            "any_worker",
            "tokens, lengths and confidences of a step come to the host with one copy",
            Moment.SOME_TIME,  # under overlap
        ),
        Hook(
            "sglang.srt.managers.scheduler_components.batch_result_processor.SchedulerBatchResultProcessor._resolve_spec_v2_tokens",
            HookType.AROUND,
            "features.builtin_worker.driver.observe",
            "any_worker",
            "there the schedule learns what became of the drafts",
        ),
        Hook(
            f"{_OWN}.dspark_worker_v2.DSparkWorkerV2.init_cuda_graphs",
            HookType.AFTER,
            "features.builtin_worker.common_draws.start",
            "simulated",
            "both workers shall keep the same drafts where their times are compared",
        ),
        Hook(
            f"{_OWN}.dspark_worker_v2.DSparkWorkerV2._forward_prefill",
            HookType.BEFORE,
            "features.builtin_worker.common_draws.before_prefill",
            "simulated",
            "which drafts are kept follows from the prompt",
        ),
        Hook(
            f"{_OWN}.dspark_worker_v2.DSparkWorkerV2._forward_decode",
            HookType.BEFORE,
            "features.builtin_worker.common_draws.before_decode",
            "simulated",
            "acceptance is not told whose drafts it judges",
        ),
        Hook(
            f"{_OWN}.dspark_verify.build_accept_outs",
            HookType.AROUND,
            "features.builtin_worker.common_draws.accept",
            "simulated",
            "SGLang's own simulation keeps as many drafts of every request",
        ),
    ),
    other_server="server.ScheduledServer",
)
