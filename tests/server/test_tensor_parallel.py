"""Two ranks: rank 0 decides, the other follows, and the text is the single server's."""

from __future__ import annotations

import itertools
import random
import re
import time
from concurrent.futures import ThreadPoolExecutor
from http.client import HTTPException

import psutil
import pytest
from golden_server import (
    CASES,
    PACE_MS,
    call,
    counting,
    endless,
    generate,
    greedy,
    output_ids,
    policy,
    prompts,
    rounds_of,
    wait_for_running,
)


@pytest.mark.parametrize(
    "name", ["auto", *(pytest.param(name, marks=pytest.mark.thorough) for name in ("random", "early-stop", "static"))]
)
def test_greedy_text_of_two_ranks(parallel, name):
    """Partial sums put the ranks' logits a few last bits off a single server's; that decides no token here."""
    rng = random.Random(1)
    adjusted = ({"frequency_penalty": 0.5, "repetition_penalty": 1.2}, {"regex": "(red|blue|green|cat|dog|bird)+"})
    parameters = itertools.cycle((*adjusted, {}, {}))
    bodies = [greedy(prompt, rng.choice((1, 5, 30)), next(parameters)) for prompt in prompts(8, seed=1)]
    with policy(parallel, "off"):
        expected = output_ids(parallel, bodies)
    with policy(parallel, name):
        golden = output_ids(parallel, [greedy(case["prompt_ids"], 64) for case in CASES[:2]])
        assert golden == [case["output_ids"] for case in CASES[:2]]
        assert output_ids(parallel, bodies) == expected


@pytest.mark.thorough
def test_sampled_and_seeded_requests_share_steps(parallel):
    """Ranks that disagreed on a draw would verify different tokens, or wait for each other for ever."""
    parameters = {"temperature": 0.8, "top_p": 0.9, "max_new_tokens": 24, "ignore_eos": True}
    bodies = [
        {"input_ids": prompt, "sampling_params": {**parameters, **({"sampling_seed": i} if i % 2 else {})}}
        for i, prompt in enumerate(prompts(12, seed=2))
    ]
    with policy(parallel, "random"):
        first, again = (generate(parallel, bodies, concurrency) for concurrency in (8, 3))
    assert {len(answer["output_ids"]) for answer in first + again} == {24}
    assert [a["output_ids"] for a in first[1::2]] == [a["output_ids"] for a in again[1::2]]


def test_ranks_keep_the_same_answers(parallel):
    body = greedy(CASES[1]["prompt_ids"], 24, speculation={"cache": "k", "trace": True})
    with policy(parallel, "static"):
        answers = [generate(parallel, [body], 1)[0] for _ in range(2)]
    assert [answer["output_ids"] for answer in answers] == [CASES[1]["output_ids"][:24]] * 2
    first, again = ([entry["from_cache"] for entry in rounds_of(answer)] for answer in answers)
    assert not any(first) and any(again)


def test_statistics_come_from_the_deciding_rank(parallel):
    stats = parallel.get_json("/dspark/stats")
    assert stats["policy"] == "auto"
    assert stats["schedule"]["step_time"] is not None
    with policy(parallel, "static", verify_len=2), counting(parallel) as counts:
        output_ids(parallel, [greedy(prompt, 24) for prompt in prompts(4, seed=3)], 1)  # none beside a prompt
        assert parallel.get_json("/dspark/stats")["policy"] == "static"
    assert counts["verified_tokens"] == 2 * counts["rounds"] > 0


def test_only_one_rank_writes_to_the_log(parallel):
    """Its drafter was stored in eight bits, which every rank dequantises for itself."""
    log = parallel.log_path.read_text()
    assert len(re.findall("DSPARK drafter .* weights stored as .*, dequantised to float32", log)) == 1
    assert "whole embedding and LM head on every rank, 0.1 MiB" in log  # 256 tokens x 128, tied, float32
    assert log.count("DSPARK drafter") == 2


def test_a_rank_that_dies_ends_the_server(parallel):
    """The last test of this server. Requests end, and the exit status of the server says that it failed."""
    body = endless([5, 6, 7], 900, stream=True)
    assert parallel.post_json("/dspark/policy", {"policy": "off", "pace_ms": PACE_MS})
    server = psutil.Process(parallel.pid)
    with ThreadPoolExecutor(3) as pool:
        requests = [pool.submit(call, parallel, "/generate", body=body) for _ in range(3)]
        wait_for_running(parallel, len(requests))
        # A forked process cannot be known by its name.
        processes = [child for child in server.children() if "resource_tracker" not in " ".join(child.cmdline())]
        _leader, follower, _detokenizer = sorted(processes, key=psutil.Process.create_time)
        follower.kill()
        assert all(isinstance(request.exception(60), OSError | HTTPException) for request in requests)
    deadline = time.monotonic() + 60
    while parallel.exit_status is None:
        assert time.monotonic() < deadline
        time.sleep(0.1)
    assert parallel.exit_status != 0
