"""Streams: messages of one token each, which together are the text, though a step brings several tokens."""

from __future__ import annotations

from sglang.srt.plugins.hook_registry import HookType

from sglang_dspark.engine.feature import Feature
from sglang_dspark.engine.hook_checks import Moment
from sglang_dspark.engine.launch.hook import Hook

FEATURE = Feature(
    __name__,
    is_used=lambda args: True,
    hooks=(
        Hook(
            "sglang.srt.managers.tokenizer_manager.TokenizerManager._stream_one_response",
            HookType.AFTER,
            "features.streams.messages.stream_tokens",
            "front_end",
            "parsers of tool calls and reasoning, and Ollama's routes, expect messages of one token, not of a step",
        ),
        Hook(
            "sglang.srt.managers.detokenizer_manager.find_printable_text",
            HookType.REPLACE,
            "features.streams.letters.whole_letters",
            "children",
            "SGLang shows text twice, or late, if messages after each other end within different letters, as steps may",
            Moment.SOME_TIME,  # called in the detokenizer alone
        ),
    ),
)
