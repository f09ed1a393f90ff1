"""Requests that DSPARK would answer otherwise than the target alone, or that would end the scheduler: HTTP 400."""

from array import array
from functools import partial
from types import SimpleNamespace

import pytest
from sglang.srt.managers.io_struct import GenerateReqInput, SessionParams, TokenizedGenerateReqInput
from sglang.srt.sampling import sampling_params
from sglang.srt.sampling.sampling_params import SamplingParams

from sglang_dspark.config import DSparkConfig
from sglang_dspark.engine.api.requests import check_request
from sglang_dspark.engine.compat.arguments import attach
from sglang_dspark.engine.launch_state import DSparkServer, TargetOnly
from sglang_dspark.features.ends.stop_regex import parse_stop_regex

OURS = DSparkServer(DSparkConfig(), None, dummy_draft=False)


def checked(ids=(5,), parameters=None, request=None, architecture="LlamaForCausalLM", server=OURS, **fields):
    """Return the fields of a request that travel on after its check.

    Args:
        parameters: sampling parameters.
        request: fields of the body.
        server: attached to SGLang's arguments.
        fields: fields of what travels.
    """
    made = {
        "rid": "a",
        "input_text": "a",
        "input_ids": array("q", ids),
        "input_embeds": None,
        "mm_inputs": None,
        "token_type_ids": None,
        "sampling_params": SamplingParams(**(parameters or {})),
        "return_logprob": False,
        "logprob_start_len": -1,
        "top_logprobs_num": 0,
        "token_ids_logprob": None,
        "stream": True,
    }
    tokenized = TokenizedGenerateReqInput(**made | fields)
    hf_config = SimpleNamespace(architectures=[architecture])
    model_config = SimpleNamespace(vocab_size=256, hf_config=hf_config)
    manager = SimpleNamespace(model_config=model_config, server_args=SimpleNamespace())
    if server is not None:
        attach(manager.server_args, server)
    check_request(tokenized, manager, GenerateReqInput(text="a", **(request or {})), "a", ids)
    return tokenized


@pytest.mark.parametrize("server", [None, TargetOnly("of its target")])
def test_another_engine_of_the_process_checks_nothing(server):
    """Hooks stay when the engine with DSPARK has ended."""
    assert checked(request={"return_hidden_states": True}, server=server).input_ids.tolist() == [5]


FIELDS = {
    "return_hidden_states": True,
    "custom_logit_processor": "x",
    "input_embeds": [[0.5]],
    "watermark": {"key": 1},
    "return_sampling_mask": True,
    "max_thinking_tokens": 5,
    "token_indices_to_pool": [1],
    "sampling_logprobs_mode": "selected",
    "return_flat_raw_top_logprobs": True,
    "return_flat_raw_output_top_logprobs": True,
}


@pytest.mark.parametrize("field", FIELDS)
def test_fields_that_are_not_served(field):
    with pytest.raises(ValueError, match=f"DSPARK does not serve {field}=.*; drop the field"):
        checked(request={field: FIELDS[field]})


@pytest.mark.parametrize(("name", "value"), [("watermark", {"enabled": True}), ("beam_width", 4)])
def test_sampling_parameters_that_are_not_served(name, value):
    with pytest.raises(ValueError, match=f"DSPARK does not serve sampling_params.{name}=.*; drop it"):
        checked(parameters={name: value})


@pytest.mark.parametrize("field", ["video_data", "audio_data"])
@pytest.mark.parametrize("architecture", ["Qwen3VLForConditionalGeneration", "Mistral3ForConditionalGeneration"])
def test_media_that_are_not_tried(field, architecture):
    with pytest.raises(ValueError, match=f"serves text and images of this target, and not {field} yet"):
        checked(request={field: ["x.mp4"]}, architecture=architecture)


def test_images_are_served():
    checked(request={"image_data": ["x.png"]}, architecture="Qwen3VLForConditionalGeneration")


@pytest.mark.parametrize("ids", [[0], [255, 0, 3], [True]])
def test_ids_of_the_vocabulary_are_served(ids):
    checked(ids)


@pytest.mark.parametrize(("ids", "named"), [([5, -1], "-1"), ([256], "256"), ([2**40, 1], str(2**40))])
def test_other_ids_are_refused_by_value(ids, named):
    with pytest.raises(
        ValueError, match=rf"^input_ids holds {named}, which is no token id; pass integers from 0 to 255$"
    ):
        checked(ids)


def test_a_prompt_has_a_token():
    """A tokenizer makes none of an empty text. In a session, SGLang looks at what earlier turns have brought."""
    for nowhere in (None, SessionParams(rid="r")):
        with pytest.raises(ValueError, match=r"the prompt has no token"):
            checked([], session_params=nowhere)
    checked([], session_params=SessionParams(id="s"))


def test_what_clients_usually_send_passes():
    usual = {"priority": 3, "extra_key": "k", "token_ids_logprob": [1, 2], "routing_key": "r", "return_logprob": True}
    parameters = {"stop": ["a", "b"], "logit_bias": {"5": 1.0}, "custom_params": {"mine": {"a": 1}}, "top_k": 2**31 - 1}
    assert checked(parameters=parameters, **usual).priority == 3


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("logprob_start_len", [1]),
        ("top_logprobs_num", [2, 3]),
        ("token_ids_logprob", ["a"]),
        ("priority", "high"),
        ("extra_key", {"a": 1}),
        ("return_logprob", [True]),
        ("rid", 5),
    ],
)
def test_a_field_of_a_wrong_type_is_named(name, value):
    """SGLang's own decoder in the scheduler raises over it, and nothing there catches that."""
    with pytest.raises(ValueError, match=f"at `{name}"):
        checked(**{name: value})


def test_a_part_of_a_wrong_type_is_named():
    with pytest.raises(ValueError, match=r"got `int` - at `session_params.id`"):
        checked(session_params=SessionParams(id=3))


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("top_k", 1.5),
        ("n", "x"),
        ("ignore_eos", "x"),
        ("regex", 3),
        ("json_schema", {"type": "object"}),
        ("custom_params", {"mine": {"a": [1]}}),
        ("custom_params", [1]),
    ],
)
def test_a_sampling_parameter_of_a_wrong_type_is_named(name, value):
    with pytest.raises(ValueError, match=f"at `sampling_params.{name}"):
        checked(parameters={name: value})


@pytest.mark.parametrize(
    ("parameters", "named"),
    [
        ({"top_k": 2**31}, r"top_k=2147483648 is out of range"),
        ({"min_new_tokens": 2**40, "max_new_tokens": None}, r"min_new_tokens=1099511627776 is out of range"),
        ({"logit_bias": {"5": 1e39}}, r"logit_bias of token 5 is 1e\+39"),
        ({"logit_bias": {"5": float("inf")}}, r"logit_bias of token 5 is inf"),
        ({"logit_bias": {"5": float("nan")}}, r"logit_bias of token 5 is nan"),
    ],
)
def test_a_number_that_no_tensor_of_sglang_holds_is_named(parameters, named):
    with pytest.raises(ValueError, match=f"^sampling_params.{named}"):
        checked(parameters=parameters)


def test_large_numbers_that_do_no_harm_pass():
    checked(parameters={"top_k": 2**31 - 1, "logit_bias": {"5": float("-inf")}})


@pytest.mark.parametrize("number", [257, -1])
def test_more_logprobs_than_tokens(number):
    with pytest.raises(ValueError, match=f"^top_logprobs_num={number} is out of range; pass 0 to 256"):
        checked(return_logprob=True, top_logprobs_num=number)
    checked(top_logprobs_num=number)


@pytest.mark.parametrize(("given", "left"), [([3, 2**40, -1, 255, 256], {3, 255}), ([2**40], set()), (None, None)])
def test_stop_tokens_that_cannot_come_are_left_out(given, left):
    """A neighbour with a minimum length would have SGLang look them up."""
    assert checked(parameters={"stop_token_ids": given}).sampling_params.stop_token_ids == left


@pytest.mark.parametrize("pattern", ["(", "a{99999999999999999999}", "[z-a]", ["ok", "*"]])
def test_a_stop_regex_that_does_not_compile_is_named(monkeypatch, pattern):
    parse = partial(parse_stop_regex, sampling_params.get_max_seq_length)
    monkeypatch.setattr(sampling_params, "get_max_seq_length", parse)
    with pytest.raises(ValueError, match=r"stop_regex is not a regular expression: .+; correct or drop it"):
        SamplingParams(stop_regex=pattern).normalize(None)
