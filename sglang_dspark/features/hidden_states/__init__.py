"""Hidden states of prompts and output tokens, as SGLang returns them (``return_hidden_states``)."""

from sglang_dspark.engine.feature import Feature
from sglang_dspark.features.hidden_states.served import HiddenStates

FEATURE = Feature(
    __name__,
    is_used=lambda args: bool(args.enable_return_hidden_states or args.return_hidden_states_mode),
    part=HiddenStates.of,
)
