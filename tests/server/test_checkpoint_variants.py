"""Other checkpoints than the golden one through a real server."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from golden_replay import load_target
from golden_server import (
    CASES,
    DRAFTER_ALONE,
    TARGET,
    assert_cut_at_the_limit,
    assert_golden_traces,
    assert_pool_is_whole,
    assert_rounds_of_reference,
    endless,
    generate,
    greedy,
    output_ids,
    policy,
    rounds_of,
)
from random_drafter import random_drafter
from reference_decoding import decode_greedy

from sglang_dspark.draft.weights import load_draft_model

PROMPT = CASES[1]["prompt_ids"]


def test_plain_dflash_in_the_form_in_which_it_is_published(dflash):
    """Sixteen slots of which fifteen predict, no heads; without a confidence head ``auto`` goes by past acceptance.

    Other forms of heads and networks: tests/worker/test_switches.py.
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
    log = adapter_graphs.log_path.read_text()
    assert [line for line in log.splitlines() if "reads values" in line or "compiled while serving" in line] == []


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
