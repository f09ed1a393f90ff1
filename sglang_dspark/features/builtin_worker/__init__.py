"""SGLang's own worker under our schedule, which decides what is verified, and whether anything is drafted.

``server.py`` is its start, ``driver.py`` decides and learns, ``step.py`` is one step. By ``common_draws.py`` the worker
as it comes accepts what ours accepts in simulations.
"""

from sglang.srt.plugins.hook_registry import HookType

from sglang_dspark.engine.compat.arguments import speculating
from sglang_dspark.engine.feature import Feature
from sglang_dspark.engine.hook_checks import Moment
from sglang_dspark.engine.launch.hook import Hook, Where
from sglang_dspark.engine.sglang_types import ServerArgs

_OWN = "sglang.srt.speculative.dspark_components"
_WORKER = f"{_OWN}.dspark_worker_v2.DSparkWorkerV2"
_PROCESSOR = "sglang.srt.managers.scheduler_components.batch_result_processor.SchedulerBatchResultProcessor"
_ALGORITHM = "sglang.srt.speculative.spec_info.SpeculativeAlgorithm"
_RESULT = "sglang.srt.managers.utils.GenerationBatchResult"


def _decodes(args: ServerArgs) -> bool:
    server = speculating(args)
    return server is not None and server.engine == "scheduled"


def _hook(
    target: str, kind: str, handler: str, reason: str, where: Where = "any_worker", by: Moment = Moment.ANSWERED
) -> Hook:
    return Hook(target, HookType(kind), f"features.builtin_worker.{handler}", where, reason, by)


_SCHEDULING = (
    # Called in the scheduler alone, where its process hears of its worker first.
    _hook(
        f"{_ALGORITHM}.create_worker", "before", "driver.install_hooks", "it is hooked", "children", Moment.SOME_TIME
    ),
    _hook(f"{_WORKER}.init_cuda_graphs", "after", "driver.start", "its own steps are measured when they are captured"),
    _hook(f"{_WORKER}._forward_decode", "around", "driver.decode", "a step is decided before anything is drafted"),
    _hook(f"{_WORKER}._forward_prefill", "before", "driver.before_prefill", "time with a prefill is not a step's"),
    _hook(f"{_OWN}.dspark_draft.DraftBlockProposer.propose", "around", "driver.propose", "it drafts in every step"),
    _hook(
        f"{_OWN}.dspark_planner.DSparkVerifyPlanner.schedule_layout",
        "replace",
        "driver.lay_out",
        "the schedule decides how many drafts of each request are verified",
    ),
    # Under overlap.
    _hook(f"{_RESULT}.copy_to_cpu", "around", "driver.copy_to_cpu", "one copy for all of a step", by=Moment.SOME_TIME),
    _hook(f"{_PROCESSOR}._resolve_spec_v2_tokens", "around", "driver.observe", "outcomes of drafts are learned there"),
)
_SIMULATING = (
    _hook(f"{_WORKER}.init_cuda_graphs", "after", "common_draws.start", "both keep the same drafts", "simulated"),
    _hook(
        f"{_WORKER}._forward_prefill",
        "before",
        "common_draws.before_prefill",
        "which drafts are kept follows from the prompt",
        "simulated",
    ),
    _hook(f"{_WORKER}._forward_decode", "before", "common_draws.before_decode", "it says whose they are", "simulated"),
    _hook(
        f"{_OWN}.dspark_verify.build_accept_outs",
        "around",
        "common_draws.accept",
        "it keeps as many of all",
        "simulated",
    ),
)

FEATURE = Feature(__name__, is_used=_decodes, hooks=(*_SCHEDULING, *_SIMULATING), other_server="server.ScheduledServer")
