"""A pool too small for its requests, and a context that they grow out of: the text is still the target's."""

from __future__ import annotations

import json
import random

import pytest
import torch
from golden_server import (
    VOCAB,
    assert_cut_at_the_limit,
    assert_pool_is_whole,
    call,
    endless,
    generate,
    greedy,
    output_ids,
    policy,
    prompts,
    states_of,
    together,
    with_options,
)


def test_retraction_and_context_limit(tight, plain):
    """A pool that cannot hold the running requests, and requests that grow into the context limit.

    With a block of 7 a step reserves 16 slots past the committed length, rows of req_to_token have room for 12 by
    default: without more headroom the neighbour's first slots would be overwritten.
    """
    rng = random.Random(3)
    bodies = [
        {
            "input_ids": rng.choices(VOCAB, k=k),
            "sampling_params": {"temperature": 0, "max_new_tokens": n},
        }
        for k, n in [(90, 37), (100, 27), (120, 7), (110, 17), (60, 67), (30, 97), (10, 117), (119, 8)] * 2
    ]
    expected, beside = output_ids(plain, bodies, 16), tight.get_json("/dspark/stats")["prompts"]["beside"]
    assert_cut_at_the_limit([answer["output_ids"] for answer in together(tight, bodies)], expected)
    assert_cut_at_the_limit(output_ids(tight, with_options(bodies), 16), expected)
    assert "KV cache pool is full. Retract requests." in tight.log_path.read_text()
    assert tight.get_json("/dspark/stats")["prompts"]["beside"] > beside
    assert_pool_is_whole(tight)


def test_retracted_requests_keep_their_counts_grammars_and_hidden_states(tight):
    """Counts of penalties and states of grammars come back with the second prefill, and every token has its state."""
    bodies = []
    for i, prompt in enumerate(prompts(16, seed=8)):
        regex = {"regex": "(red|blue|green|cat|dog|bird)+"} if i % 3 == 0 else {}
        adjusted = {"frequency_penalty": 0.4, "repetition_penalty": 1.1, **regex}
        bodies.append(greedy(prompt[:60], 60, adjusted, return_hidden_states=True))
    crowded, few = together(tight, bodies), generate(tight, bodies, 3)
    retractions = [sum(answer["meta_info"]["num_retractions"] for answer in answers) for answers in (crowded, few)]
    assert retractions[0] > retractions[1] == 0
    assert [answer["output_ids"] for answer in crowded] == [answer["output_ids"] for answer in few]
    for answer, other in zip(crowded, few, strict=True):
        torch.testing.assert_close(states_of(answer), states_of(other), atol=2e-4, rtol=2e-4)


POOL = 256  # of ``small_pool`` and ``ordered``, whose context has 1,024 tokens
# Prompts and tokens, of which the last ones end with the pool.
SIZES = [(243, 3), (249, 3), (244, 8), (238, 14), (248, 1), (180, 200), (216, 37), (249, 11), (206, 48), (226, 200)]


def bodies_near_the_end(sizes, seed, **fields):
    draw = random.Random(seed)
    return [endless(draw.choices(VOCAB, k=length), num_tokens, **fields) for length, num_tokens in sizes]


def said(answer):
    meta = answer["meta_info"]
    return answer["output_ids"], meta["finish_reason"], meta["prompt_tokens"], meta["completion_tokens"]


def expected_of(plain, bodies):
    """What a plain server with a pool as small says: SGLang ends texts two tokens before the end of the pool."""
    cut = []
    for body in bodies:
        most = min(body["sampling_params"]["max_new_tokens"], POOL - 2 - len(body["input_ids"]))
        cut.append(endless(body["input_ids"], most))
    return [said(answer) for answer in generate(plain, cut, 4)]


def test_lone_requests_at_the_end_of_a_pool_are_answered(small_pool, plain):
    """The last steps verify fewer drafts. A step used to keep 16 slots, whatever it verified, and SGLang to abort."""
    bodies = bodies_near_the_end(SIZES, seed=5)
    bodies[5]["speculation"] = {"enabled": False}
    assert [said(answer) for answer in generate(small_pool, bodies, 1)] == expected_of(plain, bodies)
    lines = call(small_pool, "/generate", body=bodies[6] | {"stream": True})[1].split("\n\n")
    chunks = [json.loads(line.removeprefix("data: ")) for line in lines if line.startswith("data: {")]
    assert [said(chunks[-1])] == expected_of(plain, bodies[6:7])
    assert_pool_is_whole(small_pool)


@pytest.mark.parametrize("name", ["static", "off"])
def test_requests_that_fill_a_pool_together_are_answered(small_pool, plain, name):
    """Some are retracted when a plain step no longer fits: what the others keep for drafts ends none of them."""
    bodies = bodies_near_the_end([(90, 100), (120, 130), (100, 90), (30, 60), (70, 200), (110, 120)], seed=7)
    with policy(small_pool, name, {"policy": "static"}):
        answers = generate(small_pool, bodies, 6)
    assert [said(answer) for answer in answers] == expected_of(plain, bodies)
    assert sum(answer["meta_info"]["num_retractions"] for answer in answers) > 0
    assert_pool_is_whole(small_pool)


@pytest.mark.thorough
def test_replayed_steps_at_the_end_of_a_pool(ordered, plain):
    """Of a captured verification the rows without drafts are padding: they write to no slot of another request."""
    bodies = bodies_near_the_end([(246, 6), (238, 200), (120, 9), (121, 10)], seed=9)
    with policy(ordered, "static"):
        answers = [*generate(ordered, bodies[:2], 1), *together(ordered, bodies[2:])]
    assert [said(answer) for answer in answers] == expected_of(plain, bodies)
    assert_pool_is_whole(ordered)
