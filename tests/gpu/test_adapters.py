"""LoRA adapters of the target on a GPU, in captured steps. Passed on an H200 with csgmv."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from golden_server import CASES, DSPARK, TARGET, generate, greedy, output_ids, policy
from lora_adapters import adapter_flags

from sglang_dspark.tools.launch import CUDA_FLAGS, LaunchedServer

if not torch.cuda.is_available():
    pytest.skip("needs an NVIDIA GPU", allow_module_level=True)

PROMPT = CASES[1]["prompt_ids"]
NAMES = ("red", "green", "blue", None)
TOKENS = 40
# In 16 bits a near-tie may fall otherwise in a batch of another shape; rows with a wrong adapter differ at once.
ALIKE = 8


def answers(server: LaunchedServer, concurrency: int) -> list[list[int]]:
    bodies = [greedy(PROMPT, TOKENS, lora_path=name) for name in NAMES] * 2
    return output_ids(server, bodies, concurrency)


@pytest.fixture(scope="module", params=["csgmv", "triton"])
def pair(request, tmp_path_factory) -> Iterator[tuple[list[list[int]], LaunchedServer]]:
    """Texts of a plain server, one request at a time, and a server of the same adapters with DSPARK."""
    folder: Path = tmp_path_factory.mktemp(request.param)
    flags = (*CUDA_FLAGS, "--dtype", "bfloat16", *adapter_flags(folder, request.param))
    env = {"HF_HUB_OFFLINE": "1"}
    with LaunchedServer(TARGET, *flags, env=env) as plain:
        expected = answers(plain, 1)
    with LaunchedServer(TARGET, *flags, *DSPARK, env=env) as server:
        yield expected, server


@pytest.mark.parametrize("name", ["static", "auto", "off"])
def test_every_request_of_a_replayed_step_has_its_adapter(pair, name):
    expected, server = pair
    assert len({tuple(text[:ALIKE]) for text in expected}) == len(NAMES)
    with policy(server, name):
        for concurrency in (1, 3, 8):
            texts = answers(server, concurrency)
            same = [ours[:ALIKE] == theirs[:ALIKE] for ours, theirs in zip(texts, expected, strict=True)]
            assert sum(same) >= len(same) - 2


def test_an_adapter_costs_drafts_and_not_all_of_them(pair):
    _, server = pair
    with policy(server, "static"):
        for name in NAMES:
            [answer] = generate(server, [greedy(PROMPT, TOKENS, lora_path=name)], 1)
            assert answer["meta_info"]["spec_accept_length"] >= 1
