"""Replicas of a server (``--dp-size``): none goes on without the others."""

from sglang.srt.plugins.hook_registry import HookType

from sglang_dspark.engine.feature import Feature
from sglang_dspark.engine.hook_checks import Moment
from sglang_dspark.engine.launch.hook import Hook

FEATURE = Feature(
    __name__,
    is_used=lambda args: args.dp_size > 1,
    hooks=(
        Hook(
            "sglang.srt.managers.data_parallel_controller.DataParallelController.event_loop",
            HookType.BEFORE,
            "features.replicas.watch.watch",
            "children",
            "SGLang does not notice that a scheduler was killed: all requests after the next one for it would hang",
            Moment.SOME_TIME,  # called in the process that starts schedulers
        ),
    ),
    checks="checks.CHECKS",
)
