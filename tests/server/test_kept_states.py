"""A target whose layers keep recurrent states, as on a GPU: steps overlap or are replayed, and states of texts stay.

Replayed steps are those of ``hybrid_graphs``: graphs as plain calls, and kernels that are interpreted.
"""

from __future__ import annotations

import random

import pytest
from family_targets import COMMON, continued, write_target
from golden_server import assert_pool_is_whole, beginning_alike, counting, endless, generate, greedy, output_ids, policy

pytestmark = [pytest.mark.slow, pytest.mark.thorough]  # SGLang does not serve it so on a CPU

NUM_TOKENS = 6  # an interpreted step takes a tenth of a second


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """The model of transformers."""
    return write_target("Qwen3_5ForCausalLM", tmp_path_factory.mktemp("target"))


def prompts(*lengths, seed=3):
    draw = random.Random(seed)
    return [draw.choices(range(2, COMMON["vocab_size"]), k=length) for length in lengths]


def texts_of(model, bodies):
    """Return what transformers writes."""
    lengths = [body["sampling_params"]["max_new_tokens"] for body in bodies]
    return [continued(model, body["input_ids"], num)[-num:] for body, num in zip(bodies, lengths, strict=True)]


@pytest.mark.parametrize("fields", [{}, {"return_logprob": True}], ids=["fused", "split"])
@pytest.mark.parametrize("name", ["static", "off"])
def test_texts(hybrid_graphs, model, name, fields):
    """One graph writes the text; so do two with the commit launched behind them. Three requests are launched."""
    bodies = [endless(prompt, NUM_TOKENS - i, **fields) for i, prompt in enumerate(prompts(2, 17, 30, seed=11))]
    with policy(hybrid_graphs, name), counting(hybrid_graphs) as grown:
        for concurrency in (2, 3):
            assert output_ids(hybrid_graphs, bodies, concurrency) == texts_of(model, bodies)
    assert grown["verified_tokens"] - grown["accepted_tokens"] > 20 or name == "off"


def test_turns_begin_at_a_state_that_a_replay_has_stored(hybrid_graphs, model):
    """Steps are replayed as one graph or as two."""
    for fields, prompt in zip(({}, {"return_logprob": True}), prompts(60, 58), strict=True):
        with policy(hybrid_graphs, "static"):
            [answer] = output_ids(hybrid_graphs, [endless(prompt, 7, **fields)], 1)
            turn = endless([*prompt, *answer, 17], 3)
            [found] = generate(hybrid_graphs, [turn], 1)
        assert ([found["output_ids"]], found["meta_info"]["cached_tokens"]) == (texts_of(model, [turn]), 64)


def test_nothing_is_read_back_or_compiled(hybrid_graphs):
    """The log covers the tests above."""
    log = hybrid_graphs.log_path.read_text()
    assert "forms of kernels compiled at start-up" in log
    assert [line for line in log.splitlines() if "reads values" in line or "compiled while serving" in line] == []


@pytest.mark.parametrize("name", ["static", "random"])
def test_rejected_drafts(hybrid_overlap, model, name):
    """All at once, and then few at a time: next to no draft of a random drafter is right."""
    hybrid_overlap.flush_cache()
    bodies = beginning_alike(6)
    with policy(hybrid_overlap, name), counting(hybrid_overlap) as grown:
        for concurrency in (6, 2):
            assert output_ids(hybrid_overlap, bodies, concurrency) == texts_of(model, bodies)
    assert grown["verified_tokens"] - grown["accepted_tokens"] > 100


def test_turns_begin_at_a_state_from_the_middle(hybrid_overlap, model):
    """At multiples of 64 tokens, of prompts and of what was written, wherever the text ended."""
    asked = prompts(50, 61, 70, 110)
    texts = [continued(model, prompt, 26) for prompt in asked]
    with policy(hybrid_overlap, "static"):
        for cut in (2, 3, 4, 5, 11, 14, 15, 18, 25):
            hybrid_overlap.flush_cache()
            ends = [text[len(prompt) + cut - 1] for prompt, text in zip(asked, texts, strict=True)]
            first = [greedy(prompt, 30, {"stop_token_ids": [end]}) for prompt, end in zip(asked, ends, strict=True)]
            answers = output_ids(hybrid_overlap, first, 4)
            turns = [endless([*prompt, *text, 17, 23], 6) for prompt, text in zip(asked, answers, strict=True)]
            found = generate(hybrid_overlap, turns, 1)
            assert [answer["output_ids"] for answer in found] == texts_of(model, turns)
            # The last token of an answer has not been read yet.
            kept = [(len(turn["input_ids"]) - 3) // 64 * 64 for turn in turns]
            assert [answer["meta_info"]["cached_tokens"] for answer in found] == kept


def test_retraction(hybrid_overlap, model):
    """States are made again from what the cache still has."""
    bodies = beginning_alike(10, 60)
    with policy(hybrid_overlap, "random"):
        answers = generate(hybrid_overlap, bodies, 10)
    assert sum(answer["meta_info"]["num_retractions"] for answer in answers) > 0
    assert [answer["output_ids"] for answer in answers] == texts_of(model, bodies)
    assert_pool_is_whole(hybrid_overlap)
