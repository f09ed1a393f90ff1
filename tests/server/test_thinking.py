"""Budgets of thinking end it where they do in steps of one token, wherever a step of several ends."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from functools import partial

import pytest
from golden_server import CASES, call, counting, greedy, policy
from sglang.srt.sampling.sampling_params import (
    REQUEST_REASONING_END_TOKEN_IDS_KEY,
    REQUEST_REASONING_IN_GRAMMAR_KEY,
)
from spoken_target import THINK_END

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
        for max_verify in (1, 2, 7):
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
