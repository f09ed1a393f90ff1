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


@pytest.fixture(params=["hybrid", "hybrid_overlap"])
def served(request):
    """Without overlap, where the radix cache gets the last state of a text, and with it."""
    return request.getfixturevalue(request.param)


def test_the_plain_server_writes_what_transformers_writes(plain_hybrid, expected):
    """The layers that SGLang lacks on a CPU are those of the tests."""
    assert output_ids(plain_hybrid, bodies_of(6), 6) == expected


@pytest.mark.parametrize("name", ["static", "random"])
def test_rejected_drafts(served, expected, name):
    """All at once, and then few at a time: next to no draft of a random drafter is right."""
    served.flush_cache()
    bodies = bodies_of(6)
    with policy(served, name), counting(served) as grown:
        assert output_ids(served, bodies, 6) == expected
        assert output_ids(served, bodies, 2) == expected
    assert grown["verified_tokens"] - grown["accepted_tokens"] > 100


@pytest.mark.parametrize("name", ["static", "random"])
def test_accepted_drafts(served, plain_hybrid, name):
    """Texts of three tokens, which go on as they did before more often than not."""
    only = {"logit_bias": {str(token): 60 for token in (17, 40, 99)}}
    bodies = [greedy(body["input_ids"], NUM_TOKENS, only) for body in bodies_of(6)]
    copying = [{**body, "speculation": {"preset": "summarization", "min_ngram": 1}} for body in bodies]
    with policy(served, name), counting(served) as grown:
        assert output_ids(served, copying, 6) == output_ids(plain_hybrid, bodies, 6)
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


def test_turns_begin_at_a_state_from_the_middle(hybrid_overlap, model):
    """At multiples of 64 tokens, of prompts and of what was written, wherever the text ended."""
    draw = random.Random(3)
    prompts = [draw.choices(range(2, COMMON["vocab_size"]), k=length) for length in (50, 61, 70, 110)]
    texts = [continued(model, prompt, 26) for prompt in prompts]
    with policy(hybrid_overlap, "static"):
        for cut in (2, 3, 4, 5, 11, 14, 15, 18, 25):
            hybrid_overlap.flush_cache()
            first = [
                greedy(prompt, 30, {"stop_token_ids": [text[len(prompt) + cut - 1]]})
                for prompt, text in zip(prompts, texts, strict=True)
            ]
            answers = output_ids(hybrid_overlap, first, 4)
            turns = [[*prompt, *answer, 17, 23] for prompt, answer in zip(prompts, answers, strict=True)]
            found = generate(hybrid_overlap, [endless(turn, 6) for turn in turns], 1)
            assert [answer["output_ids"] for answer in found] == [continued(model, turn, 6)[-6:] for turn in turns]
            # The last token of an answer has not been read yet.
            kept = [(len(turn) - 3) // 64 * 64 for turn in turns]
            assert [answer["meta_info"]["cached_tokens"] for answer in found] == kept


def test_retraction(served, plain_hybrid):
    """States are made anew from what the cache still has."""
    bodies = bodies_of(10, 60)
    expected = output_ids(plain_hybrid, bodies, 2)
    with policy(served, "random"):
        answers = generate(served, bodies, 10)
    assert sum(answer["meta_info"]["num_retractions"] for answer in answers) > 0
    assert [answer["output_ids"] for answer in answers] == expected
    assert_pool_is_whole(served)


def test_clients_that_go_away(served, expected):
    """Their slots go to others, which start from zeros."""
    bodies = bodies_of(6)
    host = served.url.removeprefix("http://")
    with policy(served, "random"):
        for body in bodies[:4]:
            connection = http.client.HTTPConnection(host, timeout=60)
            long = json.dumps(endless(body["input_ids"], 150, stream=True))
            connection.request("POST", "/generate", long, {"Content-Type": "application/json"})
            connection.getresponse().read(64)
            connection.close()
        assert output_ids(served, bodies, 4) == expected
    assert_pool_is_whole(served)
