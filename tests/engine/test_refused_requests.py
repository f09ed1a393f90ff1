"""Request fields that change what a server answers, of this SGLang or of another one that is served."""

from types import SimpleNamespace

import pytest
from sglang.srt.managers.io_struct import GenerateReqInput

from sglang_dspark.engine.front_end.requests import check_request


def manager(architecture="LlamaForCausalLM"):
    """What SGLang's front end knows of its target."""
    hf_config = SimpleNamespace(architectures=[architecture])
    target = SimpleNamespace(vocab_size=256, hf_config=hf_config)
    return SimpleNamespace(model_config=target, server_args=SimpleNamespace())


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
    request = GenerateReqInput(text="a", sampling_params={})
    setattr(request, field, FIELDS[field])
    with pytest.raises(ValueError, match=f"DSPARK does not serve {field}=.*; drop the field"):
        check_request(None, manager(), request, [5])


@pytest.mark.parametrize(("name", "value"), [("watermark", {"key": 1}), ("beam_width", 4)])
def test_sampling_parameters_that_are_not_served(name, value):
    request = GenerateReqInput(text="a", sampling_params={name: value})
    with pytest.raises(ValueError, match=f"DSPARK does not serve sampling_params.{name}=.*; drop it"):
        check_request(None, manager(), request, [5])


@pytest.mark.parametrize("field", ["image_data", "video_data", "audio_data"])
@pytest.mark.parametrize("architecture", ["Qwen3VLForConditionalGeneration", "Mistral3ForConditionalGeneration"])
def test_images_of_a_target_that_reads_them(field, architecture):
    request = GenerateReqInput(text="a", sampling_params={}, **{field: ["x.png"]})
    with pytest.raises(ValueError, match=f"serves the text of this target, and not {field} yet"):
        check_request(None, manager(architecture), request, [5])
