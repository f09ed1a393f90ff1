"""Targets in the forms in which GPUs serve them: eight-bit weights and caches, pages. Not run on one yet."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from golden_server import CASES, DSPARK, TARGET, assert_pool_is_whole, generate, greedy, policy
from server_pool import EIGHT_BITS

from sglang_dspark.tools.launch import CUDA_FLAGS, LaunchedServer

if not torch.cuda.is_available():
    pytest.skip("needs an NVIDIA GPU", allow_module_level=True)

FORMS = {
    "pages": ("--page-size", "16"),
    "large-pages": ("--page-size", "64"),
    "cache": ("--kv-cache-dtype", "fp8_e4m3"),
    "weights": ("--quantization", "fp8"),
    "everything": ("--quantization", "fp8", "--kv-cache-dtype", "fp8_e4m3", "--page-size", "64"),
}
TIGHT = ("--context-length", "128", "--schedule-conservativeness", "0.01", "--max-total-tokens", "1280")


@pytest.fixture(
    scope="module",
    params=[
        pytest.param(flags, id=name, marks=[EIGHT_BITS] if {"fp8", "fp8_e4m3"} & {*flags} else [])
        for name, flags in FORMS.items()
    ],
)
def served(request) -> Iterator[LaunchedServer]:
    flags = (*CUDA_FLAGS, "--dtype", "bfloat16", *TIGHT, *request.param, *DSPARK)
    with LaunchedServer(TARGET, *flags, env={"HF_HUB_OFFLINE": "1"}) as server:
        yield server


def test_drafts_are_accepted(served):
    """A cache or a layer that is read wrongly leaves next to none; eight bits cost some."""
    expected = [round_["accepted"] for case in CASES for round_ in case["rounds"]]
    bodies = [greedy(case["prompt_ids"], 48, speculation={"trace": True}) for case in CASES]
    with policy(served, "static"):
        answers = generate(served, bodies, 4)
    rounds = [entry["accepted"] for a in answers for entry in a["meta_info"]["dspark_trace"] if entry is not None]
    assert sum(rounds) / len(rounds) > 0.6 * sum(expected) / len(expected)


def test_a_prefix_that_is_found_again_keeps_its_drafts(served):
    served.flush_cache()
    prompt = (CASES[1]["prompt_ids"] * 3)[:80]
    with policy(served, "static"):
        first, second = (generate(served, [greedy(prompt, 32)], 1)[0]["meta_info"] for _ in range(2))
    assert first["cached_tokens"] == 0 and second["cached_tokens"] >= 64
    assert second["spec_accept_length"] > 0.8 * first["spec_accept_length"]


def test_no_slot_is_lost_by_retractions(served):
    parameters = {"temperature": 0, "max_new_tokens": 60, "ignore_eos": True}
    bodies = [{"input_ids": CASES[i % len(CASES)]["prompt_ids"], "sampling_params": parameters} for i in range(48)]
    assert all(answer["output_ids"] for answer in generate(served, bodies, 48))
    assert_pool_is_whole(served)
