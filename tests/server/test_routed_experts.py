"""Experts of every token of an answer, beside a plain server."""

import base64
import random

import numpy as np
import pytest
from golden_server import endless, generate, policy

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
