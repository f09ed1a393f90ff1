"""Memory of the device that a server gives away for a while and takes back: weights, K/V and graphs."""

from sglang.srt.plugins.hook_registry import HookType

from sglang_dspark.engine.feature import Feature
from sglang_dspark.engine.hook_checks import Moment
from sglang_dspark.engine.launch.flag_rule import FlagRule, off_gpu
from sglang_dspark.engine.launch.hook import Hook

_SCHEDULER = "sglang.srt.managers.scheduler_components.weight_updater.SchedulerWeightUpdaterManager"
_FRONT_END = "sglang.srt.managers.tokenizer_control_mixin.TokenizerControlMixin"

FEATURE = Feature(
    __name__,
    is_used=lambda args: True,
    flag_rules=(
        FlagRule(
            "enable_memory_saver",
            (False,),
            "drop the flag: SGLang gives memory of GPUs away",
            beside=off_gpu,
        ),
    ),
    hooks=(
        Hook(
            f"{_SCHEDULER}.release_memory_occupation",
            HookType.AROUND,
            "features.memory.occupation.release",
            "any_worker",
            "SGLang ends a server that has requests, and decodes requests that come while the memory is away",
            Moment.SOME_TIME,
        ),
        Hook(
            f"{_SCHEDULER}.resume_memory_occupation",
            HookType.AROUND,
            "features.memory.occupation.resume",
            "any_worker",
            "SGLang ends a server whose memory is there, and requests that came meanwhile have to go on",
            Moment.SOME_TIME,
        ),
        Hook(
            "sglang.srt.managers.scheduler.Scheduler.continue_generation",
            HookType.AFTER,
            "features.memory.occupation.stay_paused",
            "any_worker",
            "SGLang decodes after a pause, also without its memory",
            Moment.SOME_TIME,
        ),
        *(
            Hook(
                f"{_FRONT_END}.{name}_memory_occupation",
                HookType.REPLACE,
                f"features.memory.asking.{name}",
                "front_end",
                "SGLang's answer does not say that a scheduler has refused",
                Moment.SOME_TIME,
            )
            for name in ("release", "resume")
        ),
    ),
)
