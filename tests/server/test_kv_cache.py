"""K/V caches of eight bits and in pages: the text of the plain server, prefixes that are found again, no slot lost."""

from __future__ import annotations

import random
import re
from importlib.util import find_spec

import pytest
from golden_server import (
    CASES,
    VOCAB,
    assert_cut_at_the_limit,
    assert_pool_is_whole,
    generate,
    greedy,
    mixed_bodies,
    output_ids,
    policy,
)
from server_pool import ON_GPU

EIGHT_BITS = pytest.mark.skipif(
    find_spec("sglang.srt.mem_cache.kv_cache_configurator") is not None and not ON_GPU,
    reason="this release has caches of eight bits on CPUs with Intel AMX alone",
)


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
    rng = random.Random(4)
    shared = rng.choices(VOCAB, k=70)
    bodies = [
        {
            "input_ids": shared[:prefix] + rng.choices(VOCAB, k=k),
            # Not ``ignore_eos``: newer releases reserve all tokens of such a request when it is admitted.
            "sampling_params": {"temperature": 0, "max_new_tokens": n},
        }
        for prefix, k, n in [
            *((70, 20, 37), (70, 30, 27), (0, 120, 7), (64, 1, 60), (0, 63, 60)),
            *((0, 30, 97), (0, 10, 117), (0, 1, 120)),
        ]
        * 3
    ]
    expected = output_ids(plain, bodies, 16)
    for _ in range(8):
        assert_cut_at_the_limit(output_ids(paged, bodies, 16), expected)
        retracted = "KV cache pool is full. Retract requests." in paged.log_path.read_text()
        if retracted:  # who meets whom in the pool is a matter of time
            break
    assert retracted
    assert_pool_is_whole(paged)
