"""Drafters of the golden target that its own is not: of other forms with random weights, and a damaged one."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from golden_server import DRAFT

from sglang_dspark.draft.config import DraftConfig
from sglang_dspark.draft.model import DraftModel
from sglang_dspark.draft.weights import save_draft_model

VARIANTS = {
    "rnn": {
        "markov_head_type": "rnn",
        "block_size": 4,
        "target_layer_ids": [-1, 1, 3],
        "confidence_head_with_markov": False,
        "num_hidden_layers": 1,
    },
    "gated": {
        "markov_head_type": "gated",
        "block_size": 6,
        "target_layer_ids": [2],
        "markov_rank": 5,
        "num_hidden_layers": 3,
    },
    "long-block": {"block_size": 24, "markov_head_type": "vanilla"},
}


def random_drafter(folder: Path, variant: str) -> Path:
    """One of VARIANTS, without embedding and LM head of its own; returns ``folder``."""
    config = json.loads((DRAFT / "config.json").read_text()) | VARIANTS[variant]
    config["layer_types"] = ["full_attention"] * config["num_hidden_layers"]
    torch.manual_seed(3)
    model = DraftModel(DraftConfig.from_dict(config, origin="test"), own_embedding=False, own_lm_head=False)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            # Spread out, so that no two logits are close; the Markov bias weighs as much as the base logits.
            parameter.normal_(std=1.0 if "markov" in name else 0.5 if parameter.ndim == 1 else 0.15)
    save_draft_model(model, folder, include_embeddings=False)
    return folder


def damaged_drafter(folder: Path) -> Path:
    """The golden drafter with the end of its weights missing; returns ``folder``."""
    (folder / "config.json").write_bytes((DRAFT / "config.json").read_bytes())
    (folder / "model.safetensors").write_bytes((DRAFT / "model.safetensors").read_bytes()[:-1000])
    return folder
