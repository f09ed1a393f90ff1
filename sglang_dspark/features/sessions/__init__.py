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
            "sglang.srt.session.session_controller.Session.create_req",
            HookType.AROUND,
            "features.sessions.turns.make_turn",
            "any_worker",
            "tokens after an end, which a step may commit, would become part of the next turn's prompt; turns that "
            "replace all others, and refused ones with pictures, would end the server; refused ones would change their "
            "session",
            Moment.SOME_TIME,
        ),
        Hook(
            "sglang.srt.session.session_controller.SessionReqNode.clear",
            HookType.REPLACE,
            "features.sessions.turns.clear",
            "any_worker",
            "the server ends if one of the turns behind a replaced one has the name of another, or they are a thousand",
            Moment.SOME_TIME,
        ),
        Hook(
            "sglang.srt.session.session_controller.Session.finish_req",
            HookType.AROUND,
            "features.sessions.turns.finish_if_ended",
            "any_worker",
            "SGLang takes a retracted turn for one that has ended, and lets another one run beside it",
            Moment.SOME_TIME,
        ),
        Hook(
            "sglang.srt.session.streaming_session.StreamingSession.try_match_prefix",
            HookType.BEFORE,
            "features.sessions.turns.release_dropped",
            "any_worker",
            "the K/V of a retracted turn stays in its session, which may go on without the turn",
            Moment.SOME_TIME,
        ),
        Hook(
            "sglang.srt.session.streaming_session.StreamingSession.try_cache_finished_req",
            HookType.AFTER,
            "features.sessions.turns.encode_last_token_again",
            "any_worker",
            "SGLang takes a reserved slot for the K/V of a turn's last token, which no step has written",
            Moment.SOME_TIME,
        ),
    ),
)
