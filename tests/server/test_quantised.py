"""Quantised targets through a real server: the text of the plain server with the same flags.

The method is one that only tests know (``int8_method``): those of SGLang need a GPU.
"""

from __future__ import annotations

import pytest
from golden_server import CASES, assert_pool_is_whole, greedy, mixed_bodies, output_ids, policy, with_options

TOKENS = 6  # an interpreted step takes a tenth of a second


def test_text_of_a_target_that_is_quantised_with_its_head(int8, plain_int8):
    bodies = mixed_bodies(24, seed=6)
    expected = output_ids(plain_int8, bodies)
    for name in ("auto", "random"):
        with policy(int8, name):
            for concurrency in (1, 8):
                assert output_ids(int8, bodies, concurrency) == expected
    assert output_ids(int8, with_options(bodies), 8) == expected
    assert_pool_is_whole(int8)


@pytest.mark.thorough
def test_the_drafter_reads_what_it_can(int8, int8_batch):
    """Of a target with a quantised head that is not its embedding, and of one whose head is as it was."""
    assert "; read from the target: embed_tokens.weight\n" in int8.log_path.read_text()
    assert "; read from the target: embed_tokens.weight, lm_head.weight\n" in int8_batch.log_path.read_text()


def few():
    return [greedy(case["prompt_ids"], TOKENS) for case in CASES[:2]]


@pytest.mark.thorough
def test_plain_steps_where_a_batch_has_one_scale(int8_batch, plain_int8_batch):
    with policy(int8_batch, "off"):
        assert output_ids(int8_batch, few(), 1) == output_ids(plain_int8_batch, few(), 1)


@pytest.mark.thorough
def test_padding_does_not_spoil_the_scale_of_a_batch(int8_batch, plain_int8_batch):
    """Three of eight rows are no request's and take part in it: NaN or a huge number there would spoil the others.

    Drafts beside a token take part as well, so that texts may differ, but not from the beginning.
    """
    with policy(int8_batch, "static", verify_len=4):
        found = output_ids(int8_batch, few(), 1)
    expected = output_ids(plain_int8_batch, few(), 1)
    pairs = [pair for texts in zip(found, expected, strict=True) for pair in zip(*texts, strict=False)]
    assert sum(ours == theirs for ours, theirs in pairs) > len(pairs) / 2
