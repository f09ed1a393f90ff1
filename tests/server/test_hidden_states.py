"""Tests of hidden states, experts and budgets of thinking, next to a plain server."""

from __future__ import annotations

import base64
import random
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import numpy as np
import pytest
from family_targets import THINK_END, behind_pictures
from golden_server import (
    CASES,
    PACE_MS,
    TOL,
    assert_same_states,
    beginning_alike,
    call,
    counting,
    endless,
    generate,
    greedy,
    in_background,
    last_answer,
    policy,
    states_of,
    wait_for_tokens,
)
from sglang.srt.sampling.sampling_params import (
    REQUEST_REASONING_END_TOKEN_IDS_KEY,
    REQUEST_REASONING_IN_GRAMMAR_KEY,
)

ROUNDED = 0.05  # windows of convolutions have 16 bits, into which steps of several tokens round fewer of them


def repeating():
    """Texts of three tokens, which go on as they did before more often than not."""
    only = {"logit_bias": {str(token): 60 for token in (17, 40, 99)}}
    copying = {"speculation": {"preset": "summarization", "min_ngram": 1}}
    return [greedy(body["input_ids"], 24, only, **copying) for body in beginning_alike(4)]


KINDS = [
    pytest.param("hybrid", "plain_hybrid", repeating, id="recurrent"),
    pytest.param(
        *("parallel", "plain", lambda: [endless(case["prompt_ids"], 24) for case in CASES[:3]]),
        id="ranks",
        marks=pytest.mark.thorough,
    ),
    pytest.param(
        *("mistral3", "plain_mistral3", lambda: behind_pictures("Mistral3ForConditionalGeneration", 20)),
        id="pictures",
        marks=pytest.mark.thorough,
    ),
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


NEW, TOP, LAYERS = 12, 2, 5


def experts_of(answer):
    """Return [tokens, layers, experts of a token]."""
    info = answer["meta_info"]
    rows = np.frombuffer(base64.b64decode(info["routed_experts"]), dtype=np.int32).reshape(-1, LAYERS, TOP)
    assert len(rows) == info["prompt_tokens"] + info["completion_tokens"] - 1
    return rows


@pytest.mark.thorough
def test_experts_are_those_of_the_text(plain_experts, experts):
    """They are those of one request, and of several that verify other numbers of drafts in each step."""
    draw = random.Random(5)
    prompts = [draw.choices(range(2, 60), k=length) for length in (3, 17, 30, 9)]
    asked = [endless(prompt, NEW, return_routed_experts=True) for prompt in prompts]
    expected = generate(plain_experts, asked, 1)
    assert len(np.unique(np.concatenate([experts_of(answer) for answer in expected]))) > 2
    for requests, name in ((1, "static"), (4, "random")):
        with policy(experts, name):
            answers = generate(experts, asked, requests)
        assert [answer["output_ids"] for answer in answers] == [answer["output_ids"] for answer in expected]
        for answer, alone in zip(answers, expected, strict=True):
            np.testing.assert_array_equal(experts_of(answer), experts_of(alone))
    [late] = generate(experts, [asked[1] | {"routed_experts_start_len": 17}], 1)
    tail = np.frombuffer(base64.b64decode(late["meta_info"]["routed_experts"]), dtype=np.int32)
    np.testing.assert_array_equal(tail.reshape(-1, LAYERS, TOP), experts_of(expected[1])[17:])


BUDGETS = (None, 0, 1, 2, 5, 11)
AFTER = ({}, {"regex": "[0-9 ]{3,9}"})


def asked(case, budget, after, *, by_field):
    """Return a request whose budget, if any, is a field of its own or a custom parameter."""
    parameters = dict(after)
    if budget is not None and not by_field:
        parameters["custom_params"] = {"thinking_budget": budget}
    field = {"max_thinking_tokens": budget} if by_field else {}
    return greedy(case["prompt_ids"], 32, parameters, require_reasoning=True, **field)


CHOICES = [(case, budget, after) for case in CASES[:2] for budget in BUDGETS for after in AFTER]
BODIES = [asked(*choice, by_field=bool(number % 2)) for number, choice in enumerate(CHOICES)]


def texts(server, **fields):
    with ThreadPoolExecutor(8) as pool:
        answers = pool.map(partial(server.post_json, "/generate"), [body | fields for body in BODIES])
    names = ("reasoning_tokens", "prompt_tokens", "completion_tokens", "finish_reason")
    return [(answer["output_ids"], *(answer["meta_info"][name] for name in names)) for answer in answers]


@pytest.mark.parametrize("alone", ["thinking", pytest.param("plain_thinking", marks=pytest.mark.thorough)])
def test_budgets_end_thinking_as_in_steps_of_one_token(thinking, alone, request):
    with policy(thinking, "off"):
        expected = texts(request.getfixturevalue(alone))
    for (_, budget, after), (ids, thought, *_) in zip(CHOICES, expected, strict=True):
        if budget is not None:
            assert ids.index(THINK_END) <= budget
            assert thought == ids.index(THINK_END) + 1
            assert not after or len(ids) > thought
    assert any(ids.index(THINK_END) == 11 for ids, *_ in expected if THINK_END in ids)
    with policy(thinking, "static"):
        for max_verify in (2, 7):
            with counting(thinking) as counts:
                assert texts(thinking, speculation={"max_verify": max_verify}) == expected
            drawn = sum(len(ids) - 1 for ids, *_ in expected)  # the first token of a text comes with its prompt
            thoughts = sum(min(thought, len(ids)) for ids, thought, *_ in expected)
            assert counts["thinking_rounds"] < counts["rounds"] < drawn
            assert thoughts - len(expected) <= counts["thinking_rounds"] * max_verify + counts["thinking_rounds"]
    assert texts(thinking) == expected


@pytest.mark.parametrize("name", ["plain", "dspark"])
def test_a_budget_needs_a_server_that_counts_thinking(name, request):
    body = greedy(CASES[0]["prompt_ids"], 8, max_thinking_tokens=3)
    status, text = call(request.getfixturevalue(name), "/generate", body=body)
    assert status == 400
    assert "--enable-strict-thinking" in text


@pytest.mark.parametrize("budget", [-3, 2**62, 2**70, True, "3", 1.5, None, [1], {"a": 1}])
def test_no_budget_ends_the_server(thinking, budget):
    for name in ("thinking_budget", REQUEST_REASONING_END_TOKEN_IDS_KEY, REQUEST_REASONING_IN_GRAMMAR_KEY):
        body = greedy(CASES[0]["prompt_ids"], 8, {"custom_params": {name: budget}}, require_reasoning=True)
        assert call(thinking, "/generate", body=body)[0] in (200, 400)
    body = greedy(CASES[0]["prompt_ids"], 8, max_thinking_tokens=budget, require_reasoning=True)
    assert call(thinking, "/generate", body=body)[0] in (200, 400, 422)
    assert thinking.post_json("/generate", greedy(CASES[0]["prompt_ids"], 8))["output_ids"]
