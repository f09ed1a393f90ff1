"""Weights that change while the server runs: the target's and the drafter's, by SGLang's routes and its engine."""

from sglang.srt.plugins.hook_registry import HookType

from sglang_dspark.engine.feature import Feature
from sglang_dspark.engine.hook_checks import Moment
from sglang_dspark.engine.launch.hook import Hook

_UPDATER = "sglang.srt.managers.scheduler_components.weight_updater.SchedulerWeightUpdaterManager"
_MANAGER = "sglang.srt.managers.tokenizer_manager.TokenizerManager"
_WRITERS = (
    "begin_weight_update",
    "update_weights_from_disk",
    "update_weights_from_tensor",
    "update_weights_from_distributed",
    "update_weights_from_ipc",
    "end_weight_update",
)

DRAFTER = "draft"
"""The value of ``load_format`` that has ``/update_weights_from_disk`` load a drafter."""

FEATURE = Feature(
    __name__,
    is_used=lambda args: True,
    hooks=(
        *(
            Hook(
                f"{_UPDATER}.{method}",
                HookType.AROUND,
                "features.weights.handlers.write",
                "any_worker",
                "what the drafter reads of the target follows, what was learned is forgotten, and weights that do not "
                "fit are refused, where SGLang would end the server",
                Moment.SOME_TIME,
            )
            for method in _WRITERS
        ),
        Hook(
            f"{_UPDATER}._select_runners",
            HookType.AROUND,
            "features.weights.handlers.select",
            "any_worker",
            "SGLang's drafters have the names of their target's tensors, so it writes those into both",
            Moment.SOME_TIME,
        ),
        Hook(
            f"{_MANAGER}._wait_for_model_update_from_disk",
            HookType.AROUND,
            "features.weights.front_end.one_at_a_time",
            "front_end",
            "the answer to a second update would end the process that waits for the first",
            Moment.SOME_TIME,
        ),
        Hook(
            f"{_MANAGER}._update_model_path_info",
            HookType.AROUND,
            "features.weights.front_end.keep_path",
            "front_end",
            "a new drafter is loaded as a new target is, and the target's name stays",
            Moment.SOME_TIME,
        ),
    ),
    part="served.Weights",
    of_any_worker=True,
    routes="front_end.add_route",
)
