"""Tests of targets of other families, of quantised ones and of two ranks, on real servers.

Activations of the quantised one share a scale per batch (``int8_method``). Every family without a server:
tests/engine/test_checks.py; next to a plain server: test_forms.py.
"""

from __future__ import annotations

import itertools
import json
import random
import re
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from http.client import HTTPException
from pathlib import Path
from tempfile import TemporaryDirectory

import psutil
import pytest
import torch
from family_targets import NUM_TOKENS, PROMPTS, write_target
from golden_replay import lend_target, load_target
from golden_server import (
    CASES,
    DRAFTER_ALONE,
    PACE_MS,
    TARGET,
    assert_cut_at_the_limit,
    assert_golden_traces,
    assert_nothing_was_awaited,
    assert_pool_is_whole,
    assert_rounds_of_reference,
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
from random_drafter import random_drafter
from reference_decoding import decode_greedy

from sglang_dspark.draft.weights import load_draft_model


def target_of(folder):
    """The model that was written there, made again: not every one can be loaded from the form of published ones."""
    [architecture] = json.loads((folder / "config.json").read_text())["architectures"]
    with TemporaryDirectory() as elsewhere:
        return write_target(architecture, Path(elsewhere))


@pytest.mark.thorough
@pytest.mark.parametrize("name", ["gemma4_graphs", "qwen2_5_vl"])
def test_rounds_and_texts_of_replayed_steps(request, name):
    """Two pools of K/V, of which windows give others what they have left; positions of three coordinates.

    Prompts of Gemma 4 come in chunks of two windows. Hidden states of Qwen 2.5 VL come through the method for EAGLE-3.
    """
    server = request.getfixturevalue(name)
    folder = Path(server.get_json("/dspark/capabilities")["drafter"]["path"])
    model = load_draft_model(folder, dtype=torch.float32, device="cpu")
    target = lend_target(target_of(folder.parent / "target"), model)
    expected = [decode_greedy(model, target, prompt, max_new_tokens=NUM_TOKENS) for prompt in PROMPTS]
    bodies = [endless(prompt, NUM_TOKENS, speculation=DRAFTER_ALONE) for prompt in PROMPTS]
    with policy(server, "static"):
        answers = generate(server, bodies, len(bodies))
    for answer, one in zip(answers, expected, strict=True):
        assert len(answer["output_ids"]) == NUM_TOKENS
        assert_rounds_of_reference(answer, one)
    # Another batch, other verify lengths, a cached prefix.
    with policy(server, "auto"):  # emulated servers know no policy of the tests
        again = generate(server, bodies * 3, 9)
    assert [answer["output_ids"] for answer in again] == [one.output_ids[:NUM_TOKENS] for one in expected] * 3
    assert_pool_is_whole(server)


PROMPT = CASES[1]["prompt_ids"]


def test_plain_dflash_in_the_form_in_which_it_is_published(dflash):
    """Sixteen slots of which fifteen predict, no heads; without a confidence head ``auto`` goes by past acceptance.

    Other forms of heads and networks: tests/worker/test_worker.py.
    """
    stats = dflash.get_json("/dspark/stats")
    found = dflash.get_json("/dspark/capabilities")
    assert (found["block_size"], stats["policy"]) == (15, "auto")
    assert not found["drafter"]["confidence_head"]
    assert_drafts_as_the_reference(dflash)


@pytest.mark.thorough
def test_dflash_2_in_the_form_in_which_it_is_published(dflash2, plain):
    """Eight slots of which seven predict; the selector says how sure it is, and ``auto`` learns from it. Two ranks."""
    found = dflash2.get_json("/dspark/capabilities")["drafter"]
    assert (found["block_size"], found["confidence_head"], found["markov_head_type"]) == (7, True, "selector")
    assert_drafts_as_the_reference(dflash2)
    with policy(dflash2, "static"):
        answer = dflash2.post_json("/generate", greedy(PROMPT, 24, speculation=DRAFTER_ALONE | {"trace": True}))
    confidences = [round_["confidence"] for round_ in rounds_of(answer)]
    assert all(len(logits) == 7 and max(map(abs, logits)) <= 30 for logits in confidences)
    assert len({tuple(logits) for logits in confidences}) > 1
    bodies = [
        greedy(case["prompt_ids"], 32, {"temperature": 0.8, "sampling_seed": 5} if number % 2 else {})
        for number, case in enumerate(CASES)
    ]
    texts = {}
    for name in ("off", "static", "auto", "threshold"):
        with policy(dflash2, name, **({"confidence_threshold": 0.5} if name == "threshold" else {})):
            texts[name] = output_ids(dflash2, bodies)
    assert texts["static"] == texts["auto"] == texts["threshold"] == texts["off"]
    assert texts["off"][::2] == output_ids(plain, bodies[::2])
    crowd = [endless([*PROMPT[: 8 + i], 3 + i], 80) for i in range(4)]  # which begin alike
    dflash2.flush_cache()
    with policy(dflash2, "static"):
        answers = generate(dflash2, crowd, 4)
    assert [answer["output_ids"] for answer in answers] == output_ids(plain, crowd)
    assert sum(answer["meta_info"]["num_retractions"] for answer in answers) > 0
    assert sum(answer["meta_info"]["cached_tokens"] for answer in answers) > 0
    assert_pool_is_whole(dflash2)


@pytest.mark.thorough
def test_dflash_2_in_steps_that_are_replayed(adapter_graphs, tmp_path):
    """The kernel of its selector drafts what the formula says, in blocks of three, also of another drafter."""
    assert adapter_graphs.get_json("/dspark/capabilities")["block_size"] == 3
    assert_drafts_as_the_reference(adapter_graphs)
    started_with = adapter_graphs.get_json("/dspark/capabilities")["drafter"]["path"]
    for folder in (random_drafter(tmp_path / "other", "dflash2 with biases", seed=4), started_with):
        adapter_graphs.post_json("/dspark/drafter", {"path": str(folder)})
        assert adapter_graphs.get_json("/dspark/capabilities")["drafter"]["path"] == str(folder)
        assert_drafts_as_the_reference(adapter_graphs)
    assert_nothing_was_awaited(adapter_graphs)


def assert_drafts_as_the_reference(server):
    served = server.get_json("/dspark/capabilities")
    model = load_draft_model(Path(served["drafter"]["path"]), dtype=torch.float32, device="cpu")
    model.config = replace(model.config, block_size=served["block_size"] + model.config.first_slot)
    expected = decode_greedy(model, load_target(TARGET, model), PROMPT, max_new_tokens=12, stop_token_ids=[1])
    with policy(server, "static"):
        [answer] = generate(server, [greedy(PROMPT, 12, speculation=DRAFTER_ALONE)], 1)
    assert len(answer["output_ids"]) == len(expected.output_ids)
    assert_rounds_of_reference(answer, expected)
    assert len({tuple(entry["draft"]) for entry in rounds_of(answer)}) > 1


def test_the_form_of_speculators(tight):
    """With the keys that speculators 0.9.0 writes: transformers does not know what a file without ``model_type`` is."""
    path = tight.get_json("/dspark/capabilities")["drafter"]["path"]
    content = json.loads((Path(path) / "config.json").read_text())
    assert (content["speculators_version"], "model_type" in content) == ("0.9.0", False)
    assert tight.get_json("/server_info")["speculative_draft_model_path"] == path
    fitting = [case for case in CASES if len(case["prompt_ids"]) + 64 < 120]
    assert_golden_traces(tight, fitting)
    assert len(fitting) >= 4


def test_the_form_of_modelopt(adapters):
    assert_golden_traces(adapters)


@pytest.mark.thorough
def test_block_much_longer_than_the_verify_length_at_the_context_limit(long_block, plain):
    """The block reaches far past the row of K/V slots; only the verify window may be looked up there."""
    bodies = [endless(PROMPT[:8], 87 - i) for i in range(4)]
    assert_cut_at_the_limit(output_ids(long_block, bodies, 4), output_ids(plain, bodies, 4))


TOKENS = 6  # an interpreted step takes a tenth of a second


def few():
    return [greedy(case["prompt_ids"], TOKENS) for case in CASES[:2]]


@pytest.mark.thorough
def test_plain_steps_where_a_batch_has_one_scale(int8_batch, plain_int8_batch):
    with policy(int8_batch, "off"):
        assert output_ids(int8_batch, few(), 1) == output_ids(plain_int8_batch, few(), 1)


@pytest.mark.thorough
def test_padding_does_not_spoil_the_scale_of_a_batch(int8_batch, plain_int8_batch):
    """Three of eight rows are no request's and take part in it: NaN or a huge number there would spoil the others.

    Drafts next to a token take part as well, so that texts may differ, but not from the beginning.
    """
    with policy(int8_batch, "static", verify_len=4):
        found = output_ids(int8_batch, few(), 1)
    expected = output_ids(plain_int8_batch, few(), 1)
    pairs = [pair for texts in zip(found, expected, strict=True) for pair in zip(*texts, strict=False)]
    assert sum(ours == theirs for ours, theirs in pairs) > len(pairs) / 2


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
    sampled = {"temperature": 0.8, "top_p": 0.9}
    bodies = [
        endless(prompt, 24, sampled | ({"sampling_seed": i} if i % 2 else {}))
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
        output_ids(parallel, [greedy(prompt, 24) for prompt in prompts(4, seed=3)], 1)  # none with a prompt
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
