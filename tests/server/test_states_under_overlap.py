"""A target whose layers keep recurrent states, served as on a GPU: steps overlap, and states of texts are kept."""

from __future__ import annotations

import random

import pytest
from family_targets import COMMON, continued, write_target
from golden_server import assert_pool_is_whole, beginning_alike, counting, endless, generate, greedy, output_ids, policy

pytestmark = [pytest.mark.slow, pytest.mark.thorough]  # SGLang does not serve it so on a CPU


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """The model of transformers."""
    return write_target("Qwen3_5ForCausalLM", tmp_path_factory.mktemp("target"))


def texts_of(model, bodies):
    """Return what transformers writes."""
    lengths = [body["sampling_params"]["max_new_tokens"] for body in bodies]
    return [continued(model, body["input_ids"], num)[-num:] for body, num in zip(bodies, lengths, strict=True)]


@pytest.mark.parametrize("name", ["static", "random"])
def test_rejected_drafts(hybrid_overlap, model, name):
    """All at once, and then few at a time: next to no draft of a random drafter is right."""
    hybrid_overlap.flush_cache()
    bodies = beginning_alike(6)
    expected = texts_of(model, bodies)
    with policy(hybrid_overlap, name), counting(hybrid_overlap) as grown:
        assert output_ids(hybrid_overlap, bodies, 6) == expected
        assert output_ids(hybrid_overlap, bodies, 2) == expected
    assert grown["verified_tokens"] - grown["accepted_tokens"] > 100


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


def test_retraction(hybrid_overlap, model):
    """States are made again from what the cache still has."""
    bodies = beginning_alike(10, 60)
    with policy(hybrid_overlap, "random"):
        answers = generate(hybrid_overlap, bodies, 10)
    assert sum(answer["meta_info"]["num_retractions"] for answer in answers) > 0
    assert [answer["output_ids"] for answer in answers] == texts_of(model, bodies)
    assert_pool_is_whole(hybrid_overlap)
