"""SLOs: a request may name a time per token and a weight, and gets more of the drafts when it is late."""

from sglang.srt.plugins.hook_registry import HookType

from sglang_dspark.engine.feature import Feature
from sglang_dspark.engine.hook_checks import Moment
from sglang_dspark.engine.launch.hook import Hook

FEATURE = Feature(
    __name__,
    is_used=lambda args: True,
    hooks=(
        Hook(
            "sglang.srt.managers.tokenizer_manager.TokenizerManager.update_request_meta_info",
            HookType.AFTER,
            "features.slo.keys.tell_once",
            "front_end",
            "SGLang has a place for what a scheduler says of each token, and none for what it says of an answer",
            Moment.SOME_TIME,
        ),
    ),
    request_keys="keys.SloKeys",
    part="served.Slos.of",
)
