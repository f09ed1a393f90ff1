"""A target whose layers keep recurrent states, behind servers: the plain one and ours write what transformers writes.

What a verification leaves in the states themselves: tests/engine/test_recurrent_layers.py.
"""

from __future__ import annotations

import http.client
import json
import random

import pytest
from family_targets import COMMON, continued, write_target
from golden_server import assert_pool_is_whole, counting, endless, generate, greedy, output_ids, policy

pytestmark = [pytest.mark.slow, pytest.mark.thorough]  # start-up refuses such targets yet

NUM_TOKENS = 32


def bodies_of(num, num_tokens=NUM_TOKENS):
    """Greedy requests with prompts of 2 to 60 tokens, some of which begin alike."""
    draw = random.Random(7)
    shared = draw.choices(range(2, COMMON["vocab_size"]), k=25)
    prompts = [draw.choices(range(2, COMMON["vocab_size"]), k=draw.randint(2, 35)) for _ in range(num)]
    return [endless(shared + prompt if i % 3 == 0 else prompt, num_tokens) for i, prompt in enumerate(prompts)]


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """The model of transformers."""
    return write_target("Qwen3_5ForCausalLM", tmp_path_factory.mktemp("target"))


@pytest.fixture(scope="module")
def expected(model):
    """Greedy continuations of six requests."""
    return [continued(model, body["input_ids"], NUM_TOKENS)[-NUM_TOKENS:] for body in bodies_of(6)]


def test_the_plain_server_writes_what_transformers_writes(plain_hybrid, expected):
    """The layers that SGLang lacks on a CPU are those of the tests."""
    assert output_ids(plain_hybrid, bodies_of(6), 6) == expected


@pytest.mark.parametrize("name", ["static", "random"])
def test_rejected_drafts(hybrid, expected, name):
    """All at once, and then few at a time: next to no draft of a random drafter is right."""
    hybrid.flush_cache()
    bodies = bodies_of(6)
    with policy(hybrid, name), counting(hybrid) as grown:
        assert output_ids(hybrid, bodies, 6) == expected
        assert output_ids(hybrid, bodies, 2) == expected
    assert grown["verified_tokens"] - grown["accepted_tokens"] > 100


@pytest.mark.parametrize("name", ["static", "random"])
def test_accepted_drafts(hybrid, plain_hybrid, name):
    """Texts of three tokens, which go on as they did before more often than not."""
    only = {"logit_bias": {str(token): 60 for token in (17, 40, 99)}}
    bodies = [greedy(body["input_ids"], NUM_TOKENS, only) for body in bodies_of(6)]
    copying = [{**body, "speculation": {"preset": "summarization", "min_ngram": 1}} for body in bodies]
    with policy(hybrid, name), counting(hybrid) as grown:
        assert output_ids(hybrid, copying, 6) == output_ids(plain_hybrid, bodies, 6)
    assert grown["accepted_tokens"] > 30
    assert grown["verified_tokens"] - grown["accepted_tokens"] > 10


def test_turns_begin_where_others_ended(hybrid, model):
    """The cached state is that of the text that ended, whether a step brought more tokens than that or not."""
    bodies = bodies_of(4)
    texts = [continued(model, body["input_ids"], 20) for body in bodies]
    with policy(hybrid, "static"):
        for cut in (3, 8, 14, 20):
            first = [
                greedy(body["input_ids"], 30, {"stop_token_ids": [text[len(body["input_ids"]) + cut - 1]]})
                for body, text in zip(bodies, texts, strict=True)
            ]
            answers = output_ids(hybrid, first, 4)
            turns = [[*body["input_ids"], *answer, 17, 23] for body, answer in zip(bodies, answers, strict=True)]
            found = generate(hybrid, [endless(turn, 8) for turn in turns], 1)
            assert [answer["output_ids"] for answer in found] == [continued(model, turn, 8)[-8:] for turn in turns]
            cached = [answer["meta_info"]["cached_tokens"] for answer in found]
            assert max(count - len(body["input_ids"]) for count, body in zip(cached, bodies, strict=True)) > 0
    for answer, text, body in zip(answers, texts, bodies, strict=True):
        assert answer == text[len(body["input_ids"]) :][: len(answer)]


def test_retraction(hybrid, plain_hybrid):
    """States are made anew from what the cache still has."""
    bodies = bodies_of(10, 60)
    expected = output_ids(plain_hybrid, bodies, 2)
    with policy(hybrid, "random"):
        answers = generate(hybrid, bodies, 10)
    assert sum(answer["meta_info"]["num_retractions"] for answer in answers) > 0
    assert [answer["output_ids"] for answer in answers] == expected
    assert_pool_is_whole(hybrid)


def test_clients_that_go_away(hybrid, expected):
    """Their slots go to others, which start from zeros."""
    bodies = bodies_of(6)
    host = hybrid.url.removeprefix("http://")
    with policy(hybrid, "random"):
        for body in bodies[:4]:
            connection = http.client.HTTPConnection(host, timeout=60)
            long = json.dumps(endless(body["input_ids"], 150, stream=True))
            connection.request("POST", "/generate", long, {"Content-Type": "application/json"})
            connection.getresponse().read(64)
            connection.close()
        assert output_ids(hybrid, bodies, 4) == expected
    assert_pool_is_whole(hybrid)
