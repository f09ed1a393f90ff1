"""Targets of other families behind a real server: rounds and texts are those of transformers and of the reference.

Every family without a server: tests/engine/test_families.py, which also asserts that no expert is chosen narrowly;
beside a plain server: test_forms.py.
"""

from __future__ import annotations

import json
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
import torch
from family_targets import NUM_TOKENS, PROMPTS, write_target
from golden_server import assert_pool_is_whole, call, generate, policy

from sglang_dspark.draft.reference import decode_greedy
from sglang_dspark.draft.weights import load_draft_model
from sglang_dspark.tools.golden import lend_target


def test_a_mixture_of_experts(qwen3_moe):
    assert_rounds_and_texts(qwen3_moe)


@pytest.mark.thorough
def test_positions_of_three_coordinates_in_replayed_steps(qwen2_5_vl):
    """Its hidden states come through the method for EAGLE-3."""
    assert_rounds_and_texts(qwen2_5_vl, then="auto")  # emulated servers know no policy of the tests
    status, message = call(qwen2_5_vl, "/generate", body={"input_ids": PROMPTS[0], "image_data": ["x.png"]})
    assert status == 400
    assert "serves the text of this target, and not image_data" in message


def target_of(folder):
    """The model that was written there, made again: not every one can be loaded from the form of published ones."""
    [architecture] = json.loads((folder / "config.json").read_text())["architectures"]
    with TemporaryDirectory() as elsewhere:
        return write_target(architecture, Path(elsewhere))


def assert_rounds_and_texts(server, then="random"):
    """Under ``static``, and under the policy ``then``."""
    folder = Path(server.get_json("/dspark/capabilities")["drafter"]["path"])
    model = load_draft_model(folder, dtype=torch.float32, device="cpu")
    target = lend_target(target_of(folder.parent / "target"), model)
    expected = [decode_greedy(model, target, prompt, max_new_tokens=NUM_TOKENS) for prompt in PROMPTS]
    parameters = {"temperature": 0, "max_new_tokens": NUM_TOKENS, "ignore_eos": True}
    bodies = [{"input_ids": p, "sampling_params": parameters, "speculation": {"trace": True}} for p in PROMPTS]
    with policy(server, "static"):
        answers = generate(server, bodies, len(bodies))
    for answer, one in zip(answers, expected, strict=True):
        assert answer["output_ids"] == one.output_ids[:NUM_TOKENS]
        rounds = [entry for entry in answer["meta_info"]["dspark_trace"] if entry is not None]
        pairs = list(zip(rounds, one.rounds, strict=False))
        assert len(pairs) >= 8
        assert [r["draft"] for r, _ in pairs] == [r.block.tokens for _, r in pairs]
        assert [r["accepted"] for r, _ in pairs[:-1]] == [r.accepted for _, r in pairs[:-1]]
    # Another batch, other verify lengths, a cached prefix.
    with policy(server, then):
        again = generate(server, bodies * 3, 9)
    assert [answer["output_ids"] for answer in again] == [one.output_ids[:NUM_TOKENS] for one in expected] * 3
    assert_pool_is_whole(server)
