"""Prefixes that come back from host memory on a GPU, by every copy of SGLang's.

Passed on an H200: pages, and write-back.
"""

from __future__ import annotations

import random
from collections.abc import Iterator

import pytest
import torch
from golden_server import CASES, DSPARK, TARGET, VOCAB, assert_pool_is_whole, generate, greedy, output_ids, policy

from sglang_dspark.tools.launch import CUDA_FLAGS, LaunchedServer

if not torch.cuda.is_available():
    pytest.skip("needs an NVIDIA GPU", allow_module_level=True)

TIGHT = ("--context-length", "512", "--max-total-tokens", "1280", "--hicache-ratio", "8")


def copied_by(backend: str, layout: str) -> tuple[str, ...]:
    """Flags that choose one of SGLang's copies."""
    return ("--hicache-io-backend", backend, "--hicache-mem-layout", layout)


PAGES = ("--page-size", "64")
COPIES = {
    "kernel": copied_by("kernel", "layer_first"),
    "kernel-pages": (*copied_by("kernel", "page_first"), *PAGES),
    "direct": copied_by("direct", "layer_first"),
    "direct-pages": (*copied_by("direct", "page_first_direct"), *PAGES),
    "written-back": ("--hicache-write-policy", "write_back"),
}


@pytest.fixture(scope="module", params=[pytest.param(COPIES[name], id=name) for name in COPIES])
def server(request) -> Iterator[LaunchedServer]:
    flags = (*CUDA_FLAGS, "--dtype", "bfloat16", *TIGHT, "--enable-hierarchical-cache", *request.param, *DSPARK)
    with LaunchedServer(TARGET, *flags, env={"HF_HUB_OFFLINE": "1"}) as server:
        yield server


def test_a_prefix_from_host_memory_keeps_its_drafts(server):
    """A draft row that was not copied, or is read before it has come, costs nearly all drafts after it."""
    prompt = (CASES[1]["prompt_ids"] * 20)[:320]
    noise = random.Random(3)
    with policy(server, "static"):
        [first] = generate(server, [greedy(prompt, 48)], 1)
        for _ in range(6):  # more than the device holds
            output_ids(server, [greedy(noise.choices(VOCAB, k=400), 2)], 1)
        [second] = generate(server, [greedy(prompt, 48)], 1)
    first, second = first["meta_info"], second["meta_info"]
    assert first["cached_tokens"] == 0 and second["cached_tokens"] >= 256
    assert second["spec_accept_length"] > 0.9 * first["spec_accept_length"] > 1.8
    assert_pool_is_whole(server)
