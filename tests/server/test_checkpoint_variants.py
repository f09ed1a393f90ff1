"""Checkpoints of every kind through a real server: the drafts are those of the slow reference decoder."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from golden_server import CASES, DRAFT, DSPARK, TARGET, generate, greedy, output_ids

from sglang_dspark.draft.formats import read_content
from sglang_dspark.draft.model import DraftModel
from sglang_dspark.draft.reference import decode_greedy
from sglang_dspark.draft.weights import load_draft_model, save_draft_model
from sglang_dspark.tools.golden import load_target

DFLASH = {"sample_from_anchor": False, "block_size": 16, "markov_rank": 0, "enable_confidence_head": False}
VARIANTS = {
    "rnn-block4-embedding-tap-bare-confidence": {
        "markov_head_type": "rnn",
        "block_size": 4,
        "target_layer_ids": [-1, 1, 3],
        "confidence_head_with_markov": False,
        "num_hidden_layers": 1,
    },
    "gated-block6-one-tap-rank5-every-switch": {
        "markov_head_type": "gated",
        "block_size": 6,
        "target_layer_ids": [2],
        "markov_rank": 5,
        "num_hidden_layers": 3,
        "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
        "sliding_window": 5,
        "causal_layers": [True, True, False],
        "draft_vocab_size": 60,
        "attention_bias": True,
        "rope_parameters": {
            "rope_theta": 10000.0,
            "rope_type": "yarn",
            "factor": 4.0,
            "original_max_position_embeddings": 16,
        },
    },
    "dflash-block16": DFLASH,
}
STATIC = ("--speculative-dspark-schedule", "static")
LONG_BLOCK = {"block_size": 24, "markov_head_type": "vanilla"}
PROMPT = CASES[1]["prompt_ids"]


def random_drafter(folder: Path, **changes) -> Path:
    """A drafter for the golden target with random weights, without embedding and LM head of its own."""
    config = json.loads((DRAFT / "config.json").read_text()) | {"layer_types": None} | changes
    torch.manual_seed(3)
    model = DraftModel(read_content(config, origin="test").config, own_embedding=False, own_lm_head=False)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            # Spread out, so that no two logits are close; the Markov bias weighs as much as the base logits.
            parameter.normal_(std=1.0 if "markov" in name else 0.5 if parameter.ndim == 1 else 0.15)
        if model.token_ids is not None:
            model.token_ids.copy_(2 * torch.arange(len(model.token_ids)) + 1)
    save_draft_model(model, folder, include_embeddings=False)
    return folder


def publish_as_dflash(folder: Path) -> None:
    """Rewrite config.json as plain DFlash drafters have it: layout and absence of heads go without saying."""
    config = json.loads((folder / "config.json").read_text())
    nested = {key: config.pop(key) for key in ("target_layer_ids", "mask_token_id")}
    for key in DFLASH.keys() - {"block_size"}:
        del config[key]
    published = config | {"architectures": ["DFlashDraftModel"], "dflash_config": nested}
    (folder / "config.json").write_text(json.dumps(published))


@pytest.mark.parametrize("name", VARIANTS)
def test_drafts_equal_the_reference(launch, tmp_path, name):
    folder = random_drafter(tmp_path, **VARIANTS[name])
    if VARIANTS[name] is DFLASH:
        publish_as_dflash(folder)
    model = load_draft_model(folder, dtype=torch.float32, device="cpu")
    expected = decode_greedy(model, load_target(TARGET, model), PROMPT, max_new_tokens=12, stop_token_ids=[1])
    server = launch(*DSPARK[:3], str(folder), *STATIC)
    [answer] = generate(server, [greedy(PROMPT, 12, speculation={"trace": True})], 1)
    assert answer["output_ids"] == expected.output_ids
    rounds = [entry for entry in answer["meta_info"]["dspark_trace"] if entry is not None]
    assert len(rounds) >= 8
    # The reference goes on until its context is full, the server until it has its tokens.
    pairs = list(zip(rounds, expected.rounds, strict=False))
    assert [r["draft"] for r, _ in pairs] == [r.block.tokens for _, r in pairs]
    assert [r["accepted"] for r, _ in pairs[:-1]] == [r.accepted for _, r in pairs[:-1]]
    assert len({tuple(r["draft"]) for r in rounds}) > 1


def test_block_much_longer_than_the_verify_length_at_the_context_limit(launch, tmp_path):
    """The block reaches far past the row of K/V slots; only the verify window may be looked up there."""
    folder = random_drafter(tmp_path, **LONG_BLOCK)
    limit = ["--context-length", "96"]
    server = launch(*DSPARK[:3], str(folder), *STATIC, "--speculative-dspark-verify-len", "1", *limit)
    bodies = [
        {"input_ids": PROMPT[:8], "sampling_params": {"temperature": 0, "max_new_tokens": 87 - i, "ignore_eos": True}}
        for i in range(4)
    ]
    assert output_ids(server, bodies, 4) == output_ids(launch(*limit), bodies, 4)
