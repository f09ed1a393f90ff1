"""A target with windows of the context and attention sinks behind a real server on a GPU.

Verification is replayed from CUDA graphs there, beside SGLang's own attention of prompts, and both read one K/V pool.
An H200 wrote no text as a plain server did, whose Triton attention leaves the oldest key of a window out when it
decodes. So a plain server reads the texts as prompts here, in which its windows are whole. Not run on a GPU since.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from statistics import fmean

import pytest
import torch
from family_targets import written_target
from golden_server import TARGET, TINY_VOCAB, assert_pool_is_whole, endless, output_ids, policy
from random_drafter import random_drafter
from regrets import regrets

from sglang_dspark.tools.launch import CUDA_FLAGS, LaunchedServer, dspark_flags

if not torch.cuda.is_available():
    pytest.skip("needs an NVIDIA GPU", allow_module_level=True)

LENGTHS = (3, 9, 17, 24, 31, 40, 47, 60)  # of prompts; a window has 8
MOST = 0.1
"""Mean of the regrets, in logits. A CPU in 16 bits has 0.02, and 1 without sinks or with a window of one key more."""
PREFILL = ("triton", "fa3") if torch.cuda.get_device_capability()[0] == 9 else ("triton",)
Pair = tuple[LaunchedServer, LaunchedServer]


def _prompts() -> list[list[int]]:
    draw = random.Random(7)
    return [draw.choices(TINY_VOCAB, k=length) for length in LENGTHS]


PROMPTS = _prompts()


@pytest.fixture(scope="module", params=PREFILL)
def pair(request, tmp_path_factory) -> Iterator[Pair]:
    """A plain server, whose windows SGLang keeps where it likes, and a server with DSPARK."""
    folder = tmp_path_factory.mktemp("pair")
    target = written_target("GptOssForCausalLM", folder / "target")
    drafter = dspark_flags(random_drafter(folder / "draft", "tiny"))
    flags = (*CUDA_FLAGS, "--dtype", "bfloat16", "--attention-backend", request.param, "--tokenizer-path", str(TARGET))
    env = {"HF_HUB_OFFLINE": "1"}
    with LaunchedServer(target, *flags, env=env) as plain, LaunchedServer(target, *flags, *drafter, env=env) as server:
        yield plain, server


def mean_regret(plain: LaunchedServer, texts: list[list[int]]) -> float:
    """Texts to ``PROMPTS`` by the plain server."""
    return fmean(regret for text in regrets(plain, PROMPTS, texts) for regret in text)


def texts(server: LaunchedServer, concurrency: int) -> list[list[int]]:
    return output_ids(server, [endless(prompt, 20) for prompt in PROMPTS], concurrency)


@pytest.mark.parametrize("name", ["static", "auto", "off"])
def test_the_plain_server_would_have_written_every_token(pair, name):
    """Or one that lies hardly below the best: in 16 bits every other text goes on otherwise after a near-tie."""
    plain, server = pair
    with policy(server, name):
        for concurrency in (1, 3, 8):
            assert mean_regret(plain, texts(server, concurrency)) < MOST
    assert_pool_is_whole(server)
