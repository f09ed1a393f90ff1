"""Requests that SGLang's front end or scheduler would fail over: refused with a sentence, before they travel."""

import asyncio
import logging
from array import array
from types import SimpleNamespace

import pytest
from sglang.srt.managers.io_struct import GenerateReqInput, TokenizedGenerateReqInput
from sglang.srt.sampling.sampling_params import SamplingParams

from sglang_dspark.engine.front_end.requests import (
    check_request,
    check_types,
    refuse_unreadable,
    refuse_unreadable_messages,
)

LLAMA = SimpleNamespace(architectures=["LlamaForCausalLM"])
MANAGER = SimpleNamespace(model_config=SimpleNamespace(vocab_size=256, hf_config=LLAMA))


def checked(ids, **fields):
    request = GenerateReqInput(input_ids=ids, **fields)
    request.normalize_batch_and_arguments()
    check_request(None, MANAGER, request, ids)


@pytest.mark.parametrize("ids", [[0], [255, 0, 3], [True]])
def test_ids_of_the_vocabulary_are_served(ids):
    checked(ids)


@pytest.mark.parametrize(
    ("ids", "named"),
    [([5, -1], "-1"), ([256], "256"), ([2**70, 1], str(2**70)), ([5, 1.5], "1.5"), ([3, None], "None")],
)
def test_other_ids_are_refused_by_value(ids, named):
    with pytest.raises(
        ValueError, match=rf"^input_ids holds {named}, which is no token id; pass integers from 0 to 255$"
    ):
        checked(ids)


def test_a_prompt_has_a_token():
    """A tokenizer makes none of an empty text, and `input_ids` may be empty where there is a text."""
    request = GenerateReqInput(text="", input_ids=[])
    request.normalize_batch_and_arguments()
    with pytest.raises(ValueError, match=r"the prompt has no token"):
        check_request(None, MANAGER, request, [])


def tokenized(**changed):
    fields = {
        "rid": "a",
        "input_text": "a",
        "input_ids": array("q", [1]),
        "input_embeds": None,
        "mm_inputs": None,
        "token_type_ids": None,
        "sampling_params": SamplingParams(),
        "return_logprob": False,
        "logprob_start_len": -1,
        "top_logprobs_num": 0,
        "token_ids_logprob": None,
        "stream": True,
    }
    return TokenizedGenerateReqInput(**fields | changed)


def made(**changed):
    return check_types(lambda manager: tokenized(**changed), MANAGER)


def test_what_clients_usually_send_passes():
    usual = {"priority": 3, "extra_key": "k", "token_ids_logprob": [1, 2], "routing_key": "r", "return_logprob": True}
    assert made(**usual).priority == 3


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
    with pytest.raises(ValueError, match=name):
        made(**{name: value})


@pytest.mark.parametrize(
    ("parameters", "named"),
    [
        ({"top_k": 2**31}, r"top_k=2147483648 is out of range"),
        ({"min_new_tokens": 2**40, "max_new_tokens": None}, r"min_new_tokens=1099511627776 is out of range"),
        ({"logit_bias": {"5": 1e39}}, r"logit_bias of token 5 is 1e\+39"),
        ({"logit_bias": {"5": float("nan")}}, r"logit_bias of token 5 is nan"),
    ],
)
def test_a_number_that_no_tensor_of_sglang_holds_is_named(parameters, named):
    with pytest.raises(ValueError, match=f"^sampling_params: {named}"):
        made(sampling_params=SamplingParams(**parameters))


def test_large_numbers_that_do_no_harm_pass():
    made(sampling_params=SamplingParams(top_k=2**31 - 1, logit_bias={"5": float("-inf")}))


@pytest.mark.parametrize(("given", "left"), [([3, 2**40, -1, 255, 256], {3, 255}), ([2**70], set()), (None, None)])
def test_stop_tokens_that_cannot_come_are_left_out(given, left):
    """A neighbour with a minimum length would have SGLang look them up."""
    assert made(sampling_params=SamplingParams(stop_token_ids=given)).sampling_params.stop_token_ids == left


def answers(failure, before):
    """SGLang's way of answering: ``before`` answers, then ``failure``."""

    async def generate(manager, request):
        for number in range(before):
            yield number
        raise failure

    return generate


def collected(generator, kind):
    """Answers, and the error of this kind that ended them."""
    found = []

    async def run():
        async for answer in generator:
            found.append(answer)  # noqa: PERF401 - what came before the error is kept

    with pytest.raises(kind) as raised:
        asyncio.run(run())
    return found, raised.value


FAILURES = [TypeError("can't multiply"), AttributeError("no get"), KeyError("x"), OverflowError("too large")]


@pytest.mark.parametrize("failure", FAILURES, ids=lambda failure: type(failure).__name__)
def test_what_fails_before_an_answer_is_the_requests_fault(failure, caplog):
    with caplog.at_level(logging.WARNING):
        found, error = collected(refuse_unreadable(answers(failure, 0), MANAGER, None), ValueError)
    assert found == []
    assert str(error).startswith(f"the request cannot be read: {type(failure).__name__}")
    assert "cannot be read" in caplog.text

    def convert(serving, request, raw):
        raise failure

    with pytest.raises(ValueError, match="the request cannot be read"):
        refuse_unreadable_messages(convert, None, None, None)


def test_what_fails_later_or_otherwise_is_left_alone():
    failure = TypeError("of the server")
    assert collected(refuse_unreadable(answers(failure, 2), MANAGER, None), TypeError) == ([0, 1], failure)
    for other in (ValueError("SGLang's own answer"), RuntimeError("of the server")):
        assert collected(refuse_unreadable(answers(other, 0), MANAGER, None), type(other)) == ([], other)
