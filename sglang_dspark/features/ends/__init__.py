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
            "session-turns",
            "sglang.srt.session.session_controller.Session.create_req",
            HookType.BEFORE,
            "features.ends.first_end.forget_overshoot",
            "scheduler",
            "the tokens behind an end, which a step may commit, would become part of the next turn's prompt",
            Moment.SOME_TIME,
        ),
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
