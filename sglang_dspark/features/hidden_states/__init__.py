"""Hidden states of prompts and output tokens, as SGLang returns them (``return_hidden_states``)."""

from sglang.srt.plugins.hook_registry import HookType

from sglang_dspark.engine.feature import Feature
from sglang_dspark.engine.launch.hook import Hook

FEATURE = Feature(
    __name__,
    is_used=lambda args: bool(args.enable_return_hidden_states or args.return_hidden_states_mode),
    hooks=(
        Hook(
            "sglang.srt.layers.logits_processor.LogitsProcessor._get_last_hidden_states_to_store",
            HookType.REPLACE,
            "features.hidden_states.served.last_states",
            "scheduler",
            "where a drafter reads states of some layers, SGLang returns these in place of the last one's",
        ),
    ),
    part="served.HiddenStates.of",
)
