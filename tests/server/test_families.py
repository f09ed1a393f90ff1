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
from golden_replay import lend_target
from golden_server import DRAFTER_ALONE, assert_pool_is_whole, assert_rounds_of_reference, endless, generate, policy
from reference_decoding import decode_greedy

from sglang_dspark.draft.weights import load_draft_model


def target_of(folder):
    """The model that was written there, made again: not every one can be loaded from the form of published ones."""
    [architecture] = json.loads((folder / "config.json").read_text())["architectures"]
    with TemporaryDirectory() as elsewhere:
        return write_target(architecture, Path(elsewhere))


@pytest.mark.thorough
def test_two_pools_of_kv_in_replayed_steps(gemma4_graphs):
    """Prompts are encoded in chunks of two windows, and what a window has left is given to others."""
    assert_rounds_and_texts(gemma4_graphs)


@pytest.mark.thorough
def test_positions_of_three_coordinates_in_replayed_steps(qwen2_5_vl):
    """Its hidden states come through the method for EAGLE-3."""
    assert_rounds_and_texts(qwen2_5_vl)


def assert_rounds_and_texts(server):
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
