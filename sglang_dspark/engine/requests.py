"""What a request may ask for."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from sglang.srt.managers.io_struct import GenerateReqInput

from sglang_dspark.engine import speculation

_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "frequency_penalty": (None, 0, 0.0),
    "presence_penalty": (None, 0, 0.0),
    "repetition_penalty": (None, 1, 1.0),
    "min_new_tokens": (None, 0),
    "logit_bias": (None, {}),
    "json_schema": (None,),
    "regex": (None,),
    "ebnf": (None,),
    "structural_tag": (None,),
}


def check_request(result: None, manager: Any, request: Any, input_ids: Any) -> None:
    """Refuse a generation request that DSPARK would answer differently from the target alone, or cannot speculate for.

    Runs after SGLang's own validation, for every route and the offline engine.

    Raises:
        ValueError: names the field and its value; SGLang answers HTTP 400.
    """
    if isinstance(request, GenerateReqInput):
        for refusal in _refusals(request):
            raise ValueError(
                f"DSPARK does not serve {refusal} yet; drop the field or use a server without DSPARK (if the model's "
                "generation_config sets it: start with --sampling-defaults openai)"
            )
        speculation.settle(manager, request)


def _refusals(request: GenerateReqInput) -> Iterator[str]:
    for name in ("return_logprob", "return_hidden_states", "custom_logit_processor", "lora_path", "input_embeds"):
        value = getattr(request, name, None)
        if value:
            yield f"{name}={_shown(value)}"
    if isinstance(request.sampling_params, Mapping):
        yield from unserved_parameters(request.sampling_params)


def unserved_parameters(parameters: Mapping[str, Any]) -> Iterator[str]:
    """``name=value`` of every sampling parameter whose effect DSPARK would lose."""
    for name, neutral in _NEUTRAL.items():
        value = parameters.get(name)
        if value not in neutral:
            yield f"{name}={_shown(value)}"


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 80 else text[:77] + "..."
