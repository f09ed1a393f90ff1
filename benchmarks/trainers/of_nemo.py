"""Drafters written by NeMo AutoModel: configurations of its recipes, and config.json as its checkpoints have it.

Its argument is a folder.
"""

from __future__ import annotations

import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from nemo_automodel.components.speculative.dflash.core import DFlashTrainerModule
from nemo_automodel.components.speculative.dflash.registry import resolve_dflash_draft_spec
from nemo_automodel.components.speculative.dspark.config import build_draft_config
from nemo_automodel.components.speculative.dspark.registry import resolve_dspark_draft_spec
from nemo_automodel.recipes.llm.train_dflash import TrainDFlashRecipe
from nemo_automodel.recipes.llm.train_dflash2 import TrainDFlash2Recipe
from record import ANCHORS, BLOCK, MASK, TAPS, Target, keep, make_target, spread

ARCHITECTURES = ["Qwen3ForCausalLM"]
DFLASH2 = {"conv_group_size": 4, "selector_rank": 6, "selector_top_k": 4}
HEADS = {"markov_rank": 6, "markov_head_type": "vanilla", "confidence_head_alpha": 1.0}
HEADS |= {"confidence_head_with_markov": True}
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "dspark": ("dspark", HEADS),
    "dspark, gated": ("dspark", HEADS | {"markov_head_type": "gated"}),
    "dspark, rnn": ("dspark", HEADS | {"markov_head_type": "rnn"}),
    "dspark, no confidence head": ("dspark", HEADS | {"confidence_head_alpha": 0.0}),
    "dspark, no heads": ("dspark", {"markov_rank": 0, "confidence_head_alpha": 0.0}),
    "dflash": ("dflash", {}),
    "dflash, windows": ("dflash", {"draft_sliding_window": 6}),
    "dflash, multiplier and cap": ("dflash", {"output_multiplier": 0.5, "final_logit_softcapping": 4.0}),
    "dflash, heads of its own": ("dflash", {"draft_num_attention_heads": 2, "draft_num_key_value_heads": 1}),
    "dflash2": ("dflash2", DFLASH2),
    "dflash2, windows": ("dflash2", DFLASH2 | {"draft_sliding_window": 6}),
}


def save(folder: Path, model: torch.nn.Module) -> None:
    """Save a drafter with all keys of its configuration, as the trainer's checkpoints do."""
    model.save_pretrained(folder)
    (folder / "config.json").write_text(model.config.to_json_string(use_diff=False))


def write_dspark(folder: Path, target: Target, given: dict[str, Any]) -> None:
    """Write one drafter of DSpark, and what it makes of the target's hidden states."""

    class Arguments(SimpleNamespace):
        def __contains__(self, key: str) -> bool:
            return hasattr(self, key)

    taps = sorted(TAPS)  # in no other order
    options = Arguments(num_draft_layers=2, block_size=BLOCK, mask_token_id=MASK, target_layer_ids=taps, **given)
    options.num_anchors = len(ANCHORS)
    config = build_draft_config(target.model.config, options)
    config._attn_implementation = "sdpa"
    model = resolve_dspark_draft_spec(ARCHITECTURES).draft_cls(config)
    model.initialize_embeddings_and_head(embed_tokens=target.model.model.embed_tokens, lm_head=target.model.lm_head)
    save(folder, spread(model, keep=("embed_tokens", "lm_head")))

    backbone, found = model._forward_backbone, {}
    model._forward_backbone = lambda **inputs: found.setdefault("hidden", backbone(**inputs))
    loss_mask = torch.zeros(1, len(target.ids))
    loss_mask[0, [*ANCHORS, *(anchor + 1 for anchor in ANCHORS)]] = 1  # an anchor's first label counts as well
    kept = model(target.ids[None], target.features(taps), loss_mask).block_keep_mask
    assert bool(kept.all())
    hidden = found["hidden"].view(len(ANCHORS), BLOCK, -1)
    logits, first = model.compute_logits(hidden), target.ids[list(ANCHORS)]
    tokens, _ = model.sample_draft_tokens(logits, first_prev_token_ids=first, hidden_states=hidden)
    confidence = model.predict_confidence_step(hidden, torch.cat([first[:, None], tokens[:, :-1]], dim=1))
    keep(folder, target, hidden, logits, tokens, confidence)


def write_dflash(folder: Path, target: Target, recipe: type[TrainDFlashRecipe], given: dict[str, Any]) -> None:
    """Write one drafter of DFlash or DFlash 2, and what it makes of the target's hidden states."""
    builder = recipe.__new__(recipe)
    builder.block_size, builder.mask_token_id = BLOCK, MASK
    builder.draft_sliding_window = given.get("draft_sliding_window")
    draft_class = builder._draft_cls(resolve_dflash_draft_spec(ARCHITECTURES))
    config = builder._build_qwen3_draft_config(
        given,
        target_text_config=target.model.config,
        draft_cls=draft_class,
        draft_num_hidden_layers=2,
        num_target_layers=6,
        target_layer_ids=list(TAPS),
        attention_backend="sdpa",
    )
    model = spread(draft_class(config))
    save(folder, model)

    trainer = DFlashTrainerModule(
        draft_model=model,
        target_lm_head=target.model.lm_head,
        target_embed_tokens=target.model.model.embed_tokens,
        mask_token_id=MASK,
        block_size=BLOCK,
        attention_backend="sdpa",
        num_anchors=len(ANCHORS),
        sliding_window=builder.draft_sliding_window,
    )
    loss_mask = torch.zeros(1, len(target.ids))
    loss_mask[0, list(ANCHORS)] = 1
    anchors, _, noise, positions, mask, _ = trainer._prepare_block_inputs(target.ids[None], loss_mask)
    assert anchors.tolist() == [list(ANCHORS)]
    hidden = model(
        position_ids=positions, noise_embedding=noise, target_hidden=target.features(TAPS), attention_mask=mask
    )
    hidden = hidden.view(len(ANCHORS), BLOCK, -1)[:, 1:]
    logits, first = model.compute_logits(hidden, target.model.lm_head), target.ids[list(ANCHORS)]
    tokens = logits.argmax(-1)
    if recipe is TrainDFlash2Recipe:
        tokens, _, _ = model.candidate_selector.walk(hidden, logits, first, temperature=0.0)
    keep(folder, target, hidden, logits, tokens)


if __name__ == "__main__":
    root = Path(sys.argv[1])
    with torch.no_grad():
        given = make_target(root / "target")
        for name, (kind, options) in CASES.items():
            if kind == "dspark":
                write_dspark(root / name, given, options)
            else:
                write_dflash(root / name, given, TrainDFlashRecipe if kind == "dflash" else TrainDFlash2Recipe, options)
