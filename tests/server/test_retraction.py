"""A pool too small for its requests, and a context that they grow out of: the text is still the target's."""

from __future__ import annotations

import random

import torch
from golden_server import (
    VOCAB,
    assert_cut_at_the_limit,
    assert_pool_is_whole,
    generate,
    greedy,
    output_ids,
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
