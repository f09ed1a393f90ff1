"""Streams of letters of several tokens, in steps that end within them: together they are the text without a stream."""

from __future__ import annotations

import json
import random
from concurrent.futures import ThreadPoolExecutor

import pytest
from golden_server import CASES, call, policy

pytestmark = pytest.mark.slow

LIKELY = (33, 21, 3, 39, 29, 7, 13)
NUM_TOKENS = 60


def prompts(number):
    rng = random.Random(5)
    return [case["prompt_ids"] for case in CASES] + [rng.choices(LIKELY, k=17) for _ in range(number - len(CASES))]


def generate(ids):
    parameters = {"temperature": 0, "max_new_tokens": NUM_TOKENS, "ignore_eos": True}
    return {"input_ids": ids, "sampling_params": parameters}


def completion(ids):
    return {"model": "m", "prompt": ids, "temperature": 0, "max_tokens": NUM_TOKENS, "ignore_eos": True}


def chat(ids):
    messages = [{"role": "user", "content": "as in input_ids"}]
    return {"messages": messages, "input_ids": ids} | {k: v for k, v in completion(ids).items() if k != "prompt"}


def said(message):
    return (message.get("reasoning_content") or "") + (message.get("content") or "")


ROUTES = {
    "/generate": (generate, lambda answer: answer["text"]),
    "/v1/completions": (completion, lambda answer: "".join(choice["text"] for choice in answer["choices"])),
    "/v1/chat/completions": (
        chat,
        lambda answer: "".join(said(choice.get("delta") or choice.get("message")) for choice in answer["choices"]),
    ),
}


def whole(server, route, body, text_of):
    return text_of(server.post_json(route, body | {"stream": False}))


def streamed(server, route, body, text_of):
    status, text = call(server, route, body=body | {"stream": True})
    assert status == 200, text
    lines = (line.removeprefix("data: ") for line in text.splitlines())
    return [text_of(json.loads(line)) for line in lines if line.startswith("{")]


@pytest.mark.parametrize("route", ROUTES)
@pytest.mark.parametrize("name", ["corner", "scheduled"])
def test_streams_are_the_text(name, route, request):
    """It holds for our worker and SGLang's; without parsers and with; on ``/generate`` new text and all of it."""
    server = request.getfixturevalue(name)
    body_of, text_of = ROUTES[route]

    def both(ids):
        pieces = streamed(server, route, body_of(ids), text_of)
        text = pieces[-1] if name == "scheduled" and route == "/generate" else "".join(pieces)
        return text, whole(server, route, body_of(ids), text_of)

    with policy(server, "static"), ThreadPoolExecutor(4) as pool:
        found = list(pool.map(both, prompts(12)))
    assert [text for text, _ in found] == [text for _, text in found]
    assert any("界" in text for text, _ in found)


def test_a_prompt_that_is_only_scored_has_no_log_probability_of_a_token(corner, plain):
    body = generate(CASES[0]["prompt_ids"])
    body["sampling_params"]["max_new_tokens"] = 0
    body |= {"return_logprob": True, "top_logprobs_num": 2, "token_ids_logprob": [5], "logprob_start_len": 0}
    ours, theirs = (server.post_json("/generate", body) for server in (corner, plain))
    assert ours["output_ids"] == theirs["output_ids"] == []
    for name in ("output_token_logprobs", "output_token_logprobs_length"):
        assert ours["meta_info"][name] == theirs["meta_info"][name] == ([] if name.endswith("s") else 0)
    for name in ("input_token_logprobs", "output_top_logprobs", "output_token_ids_logprobs"):
        assert len(ours["meta_info"][name]) == len(theirs["meta_info"][name]) > 0
