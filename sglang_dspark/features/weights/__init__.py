"""Weights that change while the server runs, by SGLang's routes and the methods of its engine."""

from sglang.srt.plugins.hook_registry import HookType

from sglang_dspark.engine.feature import Feature
from sglang_dspark.engine.hook_checks import Moment
from sglang_dspark.engine.launch.hook import Hook

_UPDATER = "sglang.srt.managers.scheduler_components.weight_updater.SchedulerWeightUpdaterManager"
_WRITERS = (
    "update_weights_from_disk",
    "update_weights_from_tensor",
    "update_weights_from_distributed",
    "update_weights_from_ipc",
    "end_weight_update",
)

FEATURE = Feature(
    __name__,
    is_used=lambda args: True,
    hooks=tuple(
        Hook(
            method.replace("_", "-"),
            f"{_UPDATER}.{method}",
            HookType.AROUND,
            "features.weights.handlers.write",
            "any_worker",
            "what the drafter reads of the target follows, what was learned is forgotten, and weights that do not fit "
            "are refused, where SGLang would end the server",
            Moment.SOME_TIME,
        )
        for method in _WRITERS
    ),
)
