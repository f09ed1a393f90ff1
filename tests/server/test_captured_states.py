"""A target whose layers keep recurrent states, in captured steps: graphs as plain calls, kernels interpreted."""

from __future__ import annotations

import random

import pytest
from family_targets import COMMON, continued, write_target
from golden_server import counting, endless, generate, output_ids, policy

pytestmark = [pytest.mark.slow, pytest.mark.thorough]  # SGLang does not serve it so on a CPU

NUM_TOKENS = 6  # an interpreted step takes a tenth of a second


def prompts():
    """Prompts of 2 to 30 tokens."""
    draw = random.Random(11)
    return [draw.choices(range(2, COMMON["vocab_size"]), k=length) for length in (2, 17, 30)]


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """The model of transformers."""
    return write_target("Qwen3_5ForCausalLM", tmp_path_factory.mktemp("target"))


@pytest.fixture(scope="module")
def expected(model):
    """Greedy continuations."""
    return [continued(model, prompt, NUM_TOKENS)[-NUM_TOKENS:] for prompt in prompts()]


@pytest.mark.parametrize("fields", [{}, {"return_logprob": True}], ids=["fused", "split"])
@pytest.mark.parametrize("name", ["static", "off"])
def test_texts(hybrid_graphs, expected, name, fields):
    """One graph writes the text; so do two with the commit launched behind them."""
    bodies = [endless(prompt, NUM_TOKENS, **fields) for prompt in prompts()]
    with policy(hybrid_graphs, name), counting(hybrid_graphs) as grown:
        assert output_ids(hybrid_graphs, bodies, 2) == expected
    assert grown["verified_tokens"] - grown["accepted_tokens"] > 20 or name == "off"


def test_texts_of_more_requests_than_were_captured(hybrid_graphs, expected):
    """Launched steps and replayed ones take turns."""
    bodies = [endless(prompt, NUM_TOKENS - i) for i, prompt in enumerate(prompts())]
    with policy(hybrid_graphs, "static"):
        texts = output_ids(hybrid_graphs, bodies, 3)
    assert texts == [text[: NUM_TOKENS - i] for i, text in enumerate(expected)]


def test_turns_begin_at_a_state_from_the_middle(hybrid_graphs, model):
    """It was stored by the commit of a replayed step, one graph or two."""
    draw = random.Random(3)
    for fields, length in (({}, 60), ({"return_logprob": True}, 58)):
        prompt = draw.choices(range(2, COMMON["vocab_size"]), k=length)
        with policy(hybrid_graphs, "static"):
            [answer] = output_ids(hybrid_graphs, [endless(prompt, 7, **fields)], 1)
            turn = [*prompt, *answer, 17]
            [found] = generate(hybrid_graphs, [endless(turn, 3)], 1)
        assert found["output_ids"] == continued(model, turn, 3)[-3:]
        assert found["meta_info"]["cached_tokens"] == 64


def test_nothing_is_read_back_or_compiled(hybrid_graphs):
    """The log covers the tests above."""
    log = hybrid_graphs.log_path.read_text()
    assert "forms of kernels compiled at start-up" in log
    assert [line for line in log.splitlines() if "reads values" in line or "compiled while serving" in line] == []
