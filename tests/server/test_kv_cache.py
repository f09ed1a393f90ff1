"""K/V caches of eight bits and in pages: the text of the plain server, prefixes that are found again, no slot lost."""

from __future__ import annotations

import random
import re

import pytest
from golden_server import (
    CASES,
    VOCAB,
    assert_pool_is_whole,
    assert_retracted_unnoticed,
    generate,
    greedy,
    mixed_bodies,
    output_ids,
    policy,
)
from server_pool import EIGHT_BITS


@EIGHT_BITS
@pytest.mark.thorough
def test_text_of_an_eight_bit_cache(fp8, plain_fp8, plain):
    bodies = mixed_bodies(40, seed=7)
    expected = output_ids(plain_fp8, bodies)
    assert expected != output_ids(plain, bodies)  # the rounding counts
    for name in ("auto", "random", "static"):
        with policy(fp8, name):
            for concurrency in (1, 8):
                assert output_ids(fp8, bodies, concurrency) == expected
    assert_pool_is_whole(fp8)


@EIGHT_BITS
@pytest.mark.thorough
def test_the_drafter_keeps_its_own_dtype(fp8):
    """Float32 here, beside a target's cache of eight bits."""
    log = fp8.log_path.read_text()
    assert "torch.float8_e4m3fn" in log
    found = re.search(r"DSPARK draft K/V: (\d+) slots, ([\d.]+) MiB", log)
    slots, mib = int(found[1]), float(found[2])
    # K and V of two layers, each of two heads of 32 numbers.
    assert mib == pytest.approx(slots * 2 * 2 * 2 * 32 * 4 / 2**20, abs=0.05)


def test_a_prefix_in_pages_keeps_the_accept_length(paged):
    """Whole pages of the prompt come from the cache, with their draft K/V."""
    prompt = (CASES[1]["prompt_ids"] * 3)[:80]
    paged.flush_cache()
    with policy(paged, "static"):
        first, second = (generate(paged, [greedy(prompt, 40)], 1)[0]["meta_info"] for _ in range(2))
    assert (first["cached_tokens"], second["cached_tokens"]) == (0, 64)
    assert second["spec_accept_length"] == first["spec_accept_length"] > 2


def test_no_page_is_lost_by_retractions(paged, plain):
    """Of twenty pages; each of sixteen texts ends in its second or third one, and four prompts have one in common."""
    rng = random.Random(22)  # no two tokens of these texts are equally likely up to 0.001
    shared = rng.choices(VOCAB, k=70)
    prompts = [shared[:66], *(rng.choices(VOCAB, k=k) for k in (2, 9, 30))] * 4
    bodies = [
        # Not ``ignore_eos``: SGLang reserves all tokens of such a request when it is admitted.
        {"input_ids": prompt, "sampling_params": {"temperature": 0, "max_new_tokens": 126 - len(prompt)}}
        for prompt in prompts
    ]
    expected = output_ids(plain, bodies, 16)
    assert_retracted_unnoticed(paged, bodies, expected)
