"""A quantised target whose activations share one scale per batch, through a real server with replayed steps.

The method is one that only tests know (``int8_method``): those of SGLang need a GPU. Scales of rows: test_forms.py.
"""

from __future__ import annotations

import pytest
from golden_server import CASES, greedy, output_ids, policy

pytestmark = pytest.mark.thorough
TOKENS = 6  # an interpreted step takes a tenth of a second


def few():
    return [greedy(case["prompt_ids"], TOKENS) for case in CASES[:2]]


def test_plain_steps_where_a_batch_has_one_scale(int8_batch, plain_int8_batch):
    with policy(int8_batch, "off"):
        assert output_ids(int8_batch, few(), 1) == output_ids(plain_int8_batch, few(), 1)


def test_padding_does_not_spoil_the_scale_of_a_batch(int8_batch, plain_int8_batch):
    """Three of eight rows are no request's and take part in it: NaN or a huge number there would spoil the others.

    Drafts beside a token take part as well, so that texts may differ, but not from the beginning.
    """
    with policy(int8_batch, "static", verify_len=4):
        found = output_ids(int8_batch, few(), 1)
    expected = output_ids(plain_int8_batch, few(), 1)
    pairs = [pair for texts in zip(found, expected, strict=True) for pair in zip(*texts, strict=False)]
    assert sum(ours == theirs for ours, theirs in pairs) > len(pairs) / 2
