"""Promises: a request may name a time per token, and what is behind its own gets more of a step's drafts."""

from sglang.srt.plugins.hook_registry import HookType

from sglang_dspark.engine.feature import Feature
from sglang_dspark.engine.hook_checks import Moment
from sglang_dspark.engine.launch.hook import Hook

_MANAGER = "sglang.srt.managers.tokenizer_manager.TokenizerManager"

FEATURE = Feature(
    __name__,
    is_used=lambda args: True,
    hooks=(
        Hook(
            "note-promises",
            f"{_MANAGER}._create_tokenized_object",
            HookType.AFTER,
            "features.promises.answers.note",
            "front_end",
            "SGLang keeps no options of a request until its answer is complete",
        ),
        Hook(
            "report-promises",
            f"{_MANAGER}._calculate_spec_decoding_metrics",
            HookType.AFTER,
            "features.promises.answers.report",
            "front_end",
            "an answer says whether its promise was kept",
            Moment.SOME_TIME,
        ),
    ),
    request_keys="keys.PromiseKeys",
    part="served.Promises.of",
)
