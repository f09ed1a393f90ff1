"""Sessions: what a turn leaves behind for the next one is what was shown, and has K/V."""

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
            "features.sessions.turns.forget_overshoot",
            "any_worker",
            "the tokens behind an end, which a step may commit, would become part of the next turn's prompt",
            Moment.SOME_TIME,
        ),
        Hook(
            "streaming-session-turns",
            "sglang.srt.session.streaming_session.StreamingSession.try_cache_finished_req",
            HookType.AFTER,
            "features.sessions.turns.encode_last_token_again",
            "any_worker",
            "SGLang takes a reserved slot for the K/V of a turn's last token, which no step has written",
            Moment.SOME_TIME,
        ),
    ),
)
