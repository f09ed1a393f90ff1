"""Drafters with random weights, in other forms than the golden target's own, and a damaged one."""

from __future__ import annotations

import json
from pathlib import Path

import format_exports
import torch
from canonical_drafter import GEMMA
from golden_server import DRAFT
from safetensors.torch import load_file, save_file

from sglang_dspark.draft.formats import read_content
from sglang_dspark.draft.model import DraftModel
from sglang_dspark.draft.weights import save_draft_model

DFLASH = {"sample_from_anchor": False, "block_size": 16, "markov_rank": 0, "enable_confidence_head": False}
DFLASH2 = format_exports.DFLASH2 | {"block_size": 8, "conv_group_size": 8, "sample_from_anchor": False}
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
    "dflash": DFLASH,
    "dflash2": DFLASH2,
    "dflash2 with biases": DFLASH2 | {"attention_bias": True},
    "every-switch": {
        "sample_from_anchor": False,
        "block_size": 6,
        "markov_head_type": "gated",
        "target_layer_ids": [2],
        "num_hidden_layers": 3,
        "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
        "sliding_window": 5,
        "causal_layers": [True, True, False],
        "draft_vocab_size": 60,
        "attention_bias": True,
        "sink_layers": [False, True, True],
        "attention_value_scale": 0.7,
        "rope_parameters": {
            "rope_theta": 10000.0,
            "rope_type": "yarn",
            "factor": 4.0,
            "original_max_position_embeddings": 16,
        },
    },
}
# Of the targets of family_targets.
TINY = {
    "hidden_size": 64,
    "num_target_layers": 5,
    "target_layer_ids": [-1, 0, 2],
    "block_size": 4,
    "num_hidden_layers": 1,
}
OF_TINY_TARGETS = {"tiny": TINY, "gemma": GEMMA | TINY | {"hidden_act": None, "num_hidden_layers": 2}}


def random_drafter(folder: Path, variant: str, seed: int = 3) -> Path:
    """One of these variants, without embedding and LM head, of the golden target by default; returns ``folder``."""
    settings = (VARIANTS | OF_TINY_TARGETS)[variant]
    given = json.loads((DRAFT / "config.json").read_text()) | {"layer_types": None} | settings
    config = {key: value for key, value in given.items() if value is not ...}
    torch.manual_seed(seed)
    model = DraftModel(read_content(config, origin="test").config, own_embedding=False, own_lm_head=False)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            # Spread out, so that no two logits are close; the Markov bias weighs as much as the base logits.
            parameter.normal_(std=1.0 if "markov" in name else 0.5 if parameter.ndim == 1 else 0.15)
            if model.markov_head is None and ("q_norm" in name or "k_norm" in name):
                parameter.mul_(8)  # slots differ only by what they see, so they have to look at something
        if model.token_ids is not None:
            model.token_ids.copy_(2 * torch.arange(len(model.token_ids)) + 1)
    save_draft_model(model, folder, include_embeddings=False)
    if variant == "dflash":
        _publish_as_dflash(folder / "config.json")
    if variant.startswith("dflash2"):
        file = folder / "model.safetensors"
        content, tensors = format_exports.dflash2(json.loads((folder / "config.json").read_text()), load_file(file))
        (folder / "config.json").write_text(json.dumps(content))
        save_file(tensors, file)
    return folder


def _publish_as_dflash(file: Path) -> None:
    """Rewrite config.json as plain DFlash drafters have it: layout and absence of heads go without saying."""
    config = json.loads(file.read_text())
    nested = {key: config.pop(key) for key in ("target_layer_ids", "mask_token_id")}
    published = {"architectures": ["DFlashDraftModel"], "auto_map": {"AutoModel": "dflash.DFlashDraftModel"}}
    for key in DFLASH.keys() - {"block_size"}:
        del config[key]
    file.write_text(json.dumps(config | published | {"dflash_config": nested}))


def damaged_drafter(folder: Path) -> Path:
    """The golden drafter with the end of its weights missing; returns ``folder``."""
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_bytes((DRAFT / "config.json").read_bytes())
    (folder / "model.safetensors").write_bytes((DRAFT / "model.safetensors").read_bytes()[:-1000])
    return folder
