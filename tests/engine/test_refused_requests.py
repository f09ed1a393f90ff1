"""Requests that DSPARK would answer otherwise than the target alone, or that would end the scheduler: HTTP 400."""

from array import array

import pytest
from sglang.srt.managers.io_struct import GenerateReqInput, SessionParams, TokenizedGenerateReqInput
from sglang.srt.managers.tokenizer_manager import TokenizerManager
from sglang.srt.sampling.sampling_params import SamplingParams
from sglang_objects import model_config, partly, server_args

from sglang_dspark.config import DSparkConfig
from sglang_dspark.engine.requests import check_request
from sglang_dspark.engine.server import DSparkServer, TargetOnly, attach

OURS = DSparkServer(DSparkConfig(), None, dummy_draft=False)
PARTS = dict.fromkeys(("input_embeds", "mm_inputs", "token_type_ids", "token_ids_logprob"))
NUMBERS = {"return_logprob": False, "logprob_start_len": -1, "top_logprobs_num": 0, "stream": True}
PICTURES = "Qwen3VLForConditionalGeneration"


def checked(ids=(5,), parameters=None, request=None, architecture="LlamaForCausalLM", server=OURS, **fields):
    """Return the fields of a request that travel on after its check.

    Args:
        parameters: sampling parameters.
        request: fields of the body.
        server: attached to SGLang's arguments.
        fields: fields of what travels.
    """
    named = {"rid": "a", "input_text": "a", "input_ids": array("q", ids)}
    made = {**named, **PARTS, **NUMBERS, "sampling_params": SamplingParams(**(parameters or {}))}
    tokenized = TokenizedGenerateReqInput(**made | fields)
    target = model_config(architecture)
    manager = partly(TokenizerManager, model_config=target, server_args=server_args(target))
    if server is not None:
        attach(manager.server_args, server)
    check_request(tokenized, manager, GenerateReqInput(text="a", **(request or {})), "a", ids)
    return tokenized


@pytest.mark.parametrize("server", [None, TargetOnly("of its target")])
def test_another_engine_of_the_process_checks_nothing(server):
    """Hooks stay when the engine with DSPARK has ended."""
    assert checked(request={"custom_logit_processor": "x"}, server=server).input_ids.tolist() == [5]


UNSERVED = {
    "custom_logit_processor": "x", "input_embeds": [[0.5]], "watermark": {"key": 1},
    "return_sampling_mask": True, "token_indices_to_pool": [1],
    "sampling_logprobs_mode": "selected", "return_flat_raw_top_logprobs": True,
    "return_flat_raw_output_top_logprobs": True,
}  # fmt: skip
# Of a wrong type: SGLang's own decoder in the scheduler raises over them, and nothing there catches that.
FIELDS = {
    "logprob_start_len": [1], "top_logprobs_num": [2, 3], "token_ids_logprob": ["a"], "priority": "high",
    "extra_key": {"a": 1}, "return_logprob": [True], "rid": 5,
}  # fmt: skip
PARAMETERS = [
    *(("top_k", 1.5), ("n", "x"), ("ignore_eos", "x"), ("regex", 3), ("json_schema", {"type": "object"})),
    *(("custom_params", {"mine": {"a": [1]}}), ("custom_params", [1])),
]
BEYOND = "which is no token id; pass integers from 0 to 255$"
# What is asked, and what is said of it.
REFUSED = [
    *(({"request": {field: value}}, f"not serve {field}=.*; drop the field") for field, value in UNSERVED.items()),
    *(
        ({"parameters": {name: value}}, f"DSPARK does not serve sampling_params.{name}=.*; drop it")
        for name, value in (("watermark", {"enabled": True}), ("beam_width", 4))
    ),
    *(({"ids": ids}, f"^input_ids holds {named}, {BEYOND}") for ids, named in (([5, -1], -1), ([2**40, 1], 2**40))),
    ({"ids": [256]}, f"^input_ids holds 256, {BEYOND}"),
    ({"ids": []}, "the prompt has no token"),
    ({"ids": [], "session_params": SessionParams(rid="r")}, "the prompt has no token"),
    *(({name: value}, f"at `{name}") for name, value in FIELDS.items()),
    ({"session_params": SessionParams(id=3)}, "got `int` - at `session_params.id"),
    *(({"parameters": {name: value}}, f"at `sampling_params.{name}") for name, value in PARAMETERS),
    ({"parameters": {"top_k": 2**31}}, "^sampling_params.top_k=2147483648 is out of range"),
    ({"parameters": {"min_new_tokens": 2**40, "max_new_tokens": None}}, "min_new_tokens=1099511627776 is out of range"),
    *(
        ({"parameters": {"logit_bias": {"5": bias}}}, f"^sampling_params.logit_bias of token 5 is {said}")
        for bias, said in ((1e39, r"1e\+39"), (float("inf"), "inf"), (float("nan"), "nan"))
    ),
    *(
        ({"return_logprob": True, "top_logprobs_num": most}, f"^top_logprobs_num={most} is out of range; pass 0 to 256")
        for most in (257, -1)
    ),
]


@pytest.mark.parametrize(("asked", "said"), REFUSED, ids=str)
def test_what_is_refused_is_named(asked, said):
    with pytest.raises(ValueError, match=said):
        checked(**asked)


@pytest.mark.parametrize("field", ["video_data", "audio_data"])
@pytest.mark.parametrize("architecture", [PICTURES, "Mistral3ForConditionalGeneration"])
def test_media_that_are_not_tried(field, architecture):
    with pytest.raises(ValueError, match=f"serves text and images of this target, and not {field} yet"):
        checked(request={field: ["x.mp4"]}, architecture=architecture)


USUAL = {"priority": 3, "extra_key": "k", "token_ids_logprob": [1, 2], "routing_key": "r", "return_logprob": True}
HARMLESS = {"stop": ["a", "b"], "logit_bias": {"5": float("-inf"), "6": 1.0}, "custom_params": {"mine": {"a": 1}}}


@pytest.mark.parametrize(
    "asked",
    [
        *({"ids": ids} for ids in ([0], [255, 0, 3], [True])),
        {"ids": [], "session_params": SessionParams(id="s")},  # SGLang looks at what earlier turns have brought
        {"parameters": HARMLESS | {"top_k": 2**31 - 1}, **USUAL},
        {"request": {"image_data": ["x.png"]}, "architecture": PICTURES},
        {"top_logprobs_num": 257},  # of a request without log-probabilities
    ],
    ids=str,
)
def test_what_is_served_passes(asked):
    assert checked(**asked).priority == asked.get("priority")


@pytest.mark.parametrize(("given", "left"), [([3, 2**40, -1, 255, 256], {3, 255}), ([2**40], set()), (None, None)])
def test_stop_tokens_that_cannot_come_are_left_out(given, left):
    """A neighbour with a minimum length would have SGLang look them up."""
    assert checked(parameters={"stop_token_ids": given}).sampling_params.stop_token_ids == left
