"""Ends of texts: a step brings several tokens, and the first of several ends among them counts."""

from sglang.srt.plugins.hook_registry import HookType

from sglang_dspark.engine.feature import Feature
from sglang_dspark.engine.hook_checks import Moment
from sglang_dspark.engine.launch.hook import Hook

FEATURE = Feature(
    __name__,
    is_used=lambda args: True,
    hooks=(
        Hook(
            "parse-stop-regex",
            "sglang.srt.sampling.sampling_params.get_max_seq_length",
            HookType.AROUND,
            "features.ends.stop_regex.parse_stop_regex",
            "front_end",
            "SGLang answers HTTP 500 to an expression that does not compile",
            Moment.SOME_TIME,
        ),
    ),
    part="served.Ends.of",
)
