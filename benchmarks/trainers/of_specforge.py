"""Drafters written by SpecForge: its export to Hugging Face's format, from a draft configuration and a training state.

Its argument is a folder.
"""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
from record import ANCHORS, BLOCK, MASK, TAPS, Target, keep, make_target, spread
from specforge.algorithms.common.dflash_family_model import OnlineDFlashModel
from specforge.export.to_hf import export_to_hf
from specforge.modeling.auto import AutoDraftModel, AutoDraftModelConfig

HEADS = {"markov_rank": 6, "markov_head_type": "vanilla", "enable_confidence_head": True}
DSPARK = HEADS | {"confidence_head_with_markov": True, "projector_type": "dspark", "confidence_head_alpha": 1.0}
WINDOWS = {"layer_types": ["sliding_attention"] * 2, "sliding_window": 8, "use_sliding_window": True}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32}
CASES: dict[str, tuple[dict[str, Any] | None, dict[str, Any]]] = {
    # Heads, None for a DFlash drafter's absence of them, and keys beside them.
    "dspark": (DSPARK, {}),
    "dspark, gated": (DSPARK | {"markov_head_type": "gated"}, {}),
    "dspark, rnn": (DSPARK | {"markov_head_type": "rnn"}, {}),
    "dspark, bare confidence head": (DSPARK | {"confidence_head_with_markov": False}, {}),
    "dspark, heads by their shares of the loss": (
        {"projector_type": "dspark", "markov_rank": 6, "confidence_head_alpha": 0.5},
        {},
    ),
    "dspark, no heads": ({"projector_type": "dspark"}, {}),
    "dspark, as many heads for keys": (DSPARK | {"attention_mode": "mha"}, {"num_key_value_heads": 4}),
    "dspark, windows": (DSPARK, WINDOWS),
    "dspark, a window in one layer": (DSPARK, WINDOWS | {"layer_types": ["full_attention", "sliding_attention"]}),
    "dspark, YaRN": (DSPARK, {"rope_scaling": YARN}),
    "dspark, biases": (DSPARK, {"attention_bias": True}),
    "dflash": (None, {}),
    "dflash, windows": (None, WINDOWS),
}


def write(folder: Path, target: Target, heads: dict[str, Any] | None, layers: dict[str, Any]) -> None:
    """Write one drafter, and what it makes of the target's hidden states."""
    config = target.model.config.to_dict()
    keys = "vocab_size hidden_size intermediate_size num_attention_heads num_key_value_heads head_dim hidden_act "
    keys += "rms_norm_eps max_position_embeddings initializer_range"
    given = {key: config[key] for key in keys.split()}
    given |= {"model_type": "qwen3", "num_hidden_layers": 2, "num_target_layers": 6, "block_size": BLOCK}
    given |= {"rope_theta": 500.0, "layer_types": ["full_attention"] * 2, "tie_word_embeddings": False, **layers}
    given |= {"architectures": ["DFlashDraftModel" if heads is None else "DSparkDraftModel"]}
    given |= {"dflash_config": {"target_layer_ids": list(TAPS), "mask_token_id": MASK, **(heads or {})}}
    with tempfile.TemporaryDirectory() as temporary:
        file, state = Path(temporary, "draft.json"), Path(temporary, "state.pt")
        file.write_text(json.dumps(given))
        draft_config = AutoDraftModelConfig.from_file(str(file))
        draft_config._attn_implementation = "sdpa"
        model = spread(AutoDraftModel.from_config(draft_config))
        torch.save({"draft_state_dict": model.state_dict()}, state)
        export_to_hf(str(state), str(file), str(folder))

    trainer = OnlineDFlashModel(
        draft_model=model,
        target_lm_head=target.model.lm_head,
        target_embed_tokens=target.model.model.embed_tokens,
        mask_token_id=MASK,
        block_size=BLOCK,
        attention_backend="sdpa",
    )
    loss_mask = torch.zeros(1, len(target.ids))
    loss_mask[0, [*ANCHORS, *(anchor + 1 for anchor in ANCHORS)]] = 1  # an anchor's first label counts as well
    anchors, _, hidden = trainer._forward_draft_blocks(target.ids[None], target.features(TAPS), loss_mask)
    assert anchors.tolist() == [list(ANCHORS)]
    hidden = hidden.view(len(ANCHORS), BLOCK, -1)[:, 1 if heads is None else 0 :]
    logits, first = target.model.lm_head(hidden), target.ids[list(ANCHORS)]
    tokens, confidence = logits.argmax(-1), None
    if getattr(model, "markov_head", None) is not None:
        tokens, _ = model.markov_head.sample_block_tokens(logits, first_prev_token_ids=first, hidden_states=hidden)
    if heads is not None:
        previous = torch.cat([first[:, None], tokens[:, :-1]], dim=1)
        confidence = model.predict_confidence(hidden, prev_token_ids=previous)
    keep(folder, target, hidden, logits, tokens, confidence)


if __name__ == "__main__":
    root = Path(sys.argv[1])
    with torch.no_grad():
        given = make_target(root / "target")
        for name, (heads, layers) in CASES.items():
            write(root / name, given, heads, layers)
