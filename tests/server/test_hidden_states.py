"""Hidden states behind pictures, of recurrent layers, of two ranks and of aborted requests are the plain server's."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from functools import partial

import pytest
from golden_server import (
    CASES,
    PACE_MS,
    TOL,
    assert_same_states,
    beginning_alike,
    call,
    endless,
    generate,
    greedy,
    in_background,
    last_answer,
    policy,
    states_of,
    wait_for_tokens,
)
from picture_targets import data_url, picture, place

ROUNDED = 0.05  # windows of convolutions have 16 bits, into which steps of several tokens round fewer of them
PICTURES = (picture(1, 80, 56), picture(2, 120, 120))


def repeating():
    """Texts of three tokens, which go on as they did before more often than not."""
    only = {"logit_bias": {str(token): 60 for token in (17, 40, 99)}}
    copying = {"speculation": {"preset": "summarization", "min_ngram": 1}}
    return [greedy(body["input_ids"], 24, only, **copying) for body in beginning_alike(4)]


def behind_pictures():
    mark = place("Mistral3ForConditionalGeneration")
    asked = ((f"u:what is this {mark} then;a:", 1), (f"one {mark} two {mark} end", 2), ("just text here", 0))
    parameters = {"temperature": 0, "max_new_tokens": 20, "ignore_eos": True}
    return [
        {"text": text, "image_data": list(map(data_url, PICTURES[:count])) or None, "sampling_params": parameters}
        for text, count in asked
    ]


KINDS = [
    pytest.param("hybrid", "plain_hybrid", repeating, id="recurrent"),
    pytest.param("parallel", "plain", lambda: [endless(case["prompt_ids"], 24) for case in CASES[:3]], id="ranks"),
    pytest.param("mistral3", "plain_mistral3", behind_pictures, id="pictures", marks=pytest.mark.thorough),
]


@pytest.mark.parametrize(("name", "alone", "bodies"), KINDS)
def test_states_are_those_of_the_plain_server(name, alone, bodies, request):
    """They come for whole texts and for streams, in batches with requests that ask for none."""
    server, plain = map(request.getfixturevalue, (name, alone))
    asked = [
        body | {"return_hidden_states": mode, "stream": stream}
        for mode, stream in ((True, False), (True, True), (False, False))
        for body in bodies()
    ]
    with policy(server, "static"), ThreadPoolExecutor(6) as pool:
        expected, found = (list(pool.map(partial(last_answer, each), asked)) for each in (plain, server))
    for answer, rightly in zip(found, expected, strict=True):
        assert answer["output_ids"] == rightly["output_ids"]
        assert_same_states(answer, rightly, ROUNDED if name == "hybrid" else TOL)


def test_an_aborted_text_has_the_states_of_its_tokens(thinking, plain):
    prompt, answers = CASES[0]["prompt_ids"], []
    body = endless(prompt, 400, rid="ended", return_hidden_states=True, speculation={"max_verify": 1})
    with policy(thinking, "static", pace_ms=PACE_MS):
        before = thinking.get_json("/dspark/stats")
        turn = in_background(lambda: answers.extend(generate(thinking, [body], 1)))
        wait_for_tokens(thinking, before, 20)
        assert call(thinking, "/abort_request", body={"rid": "ended"})[0] == 200
        turn.join()
    assert answers[0]["meta_info"]["finish_reason"]["type"] == "abort"
    [whole] = generate(plain, [endless(prompt, len(answers[0]["output_ids"]), return_hidden_states=True)], 1)
    assert answers[0]["output_ids"] == whole["output_ids"]
    assert len(states_of(answers[0])) == len(whole["output_ids"])
    assert_same_states(answers[0], whole)
