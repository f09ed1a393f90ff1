"""Drafters written by speculators: built as by ``speculators train --dry-run``, from its flags.

Its argument is a folder.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

import torch
from record import ANCHORS, BLOCK, MASK, TAPS, VOCABULARY, Target, keep, make_target, spread, walk
from speculators.model import SpeculatorModel
from speculators.models.eagle3.rotary_partial import install_partial_neox_rotary
from speculators.train.cli import build_draft_model
from speculators.train.config import TrainConfig
from speculators.train.vocab_mapping import build_vocab_mappings_from_distribution

FULL, MIXED = {"full_attention_indices": [0, 1]}, {"full_attention_indices": [1], "sliding_window": 4}
SLIDING = {"sliding_window": 4}  # in all layers
DFLASH2 = {"speculator_type": "dflash2", "conv_group_size": 4, "selector_rank": 6, "selector_top_k": 4}
CASES: dict[str, dict[str, Any]] = {
    "dspark": FULL,
    "dspark, gated": FULL | {"markov_head_type": "gated"},
    "dspark, rnn": FULL | {"markov_head_type": "rnn"},
    "dspark, anchor does not predict": FULL | {"sample_from_anchor": False},
    "dspark, anchor does not predict, rnn": FULL | {"sample_from_anchor": False, "markov_head_type": "rnn"},
    "dspark, no confidence head": FULL | {"enable_confidence_head": False, "confidence_head_with_markov": False},
    "dspark, bare confidence head": FULL | {"confidence_head_with_markov": False},
    "dspark, no Markov head": FULL | {"markov_rank": 0, "confidence_head_with_markov": False},
    "dspark, windows": SLIDING,
    "dspark, windows that look ahead": SLIDING | {"sliding_window_non_causal": True},
    "dspark, a window in one layer": MIXED | {"markov_head_type": "gated"},
    "dspark, reduced vocabulary": FULL | {"draft_vocab_size": 23},
    "dspark, layers of Llama": FULL | {"draft_arch": "llama"},
    "dspark, target that rotates parts of heads": FULL | {"draft_mrope_full_head_hack": False},
    "dspark, target that rotates parts of heads, widened": FULL | {"draft_mrope_full_head_hack": True},
    "dflash": FULL | {"speculator_type": "dflash"},
    "dflash, every slot predicts": FULL | {"speculator_type": "dflash", "sample_from_anchor": True},
    "dflash, windows": SLIDING | {"speculator_type": "dflash"},
    "dflash, reduced vocabulary": MIXED | {"speculator_type": "dflash", "draft_vocab_size": 23},
    "dflash2": FULL | DFLASH2,
    "dflash2, every slot predicts": FULL | DFLASH2 | {"sample_from_anchor": True},
    "dflash2, windows": SLIDING | DFLASH2 | {"sliding_window_non_causal": True},
    "dflash2, causal window, three taps": MIXED | DFLASH2 | {"sliding_window_non_causal": False, "conv_kernel_size": 3},
}


def rotate_parts(file: Path) -> None:
    """Make a target's config.json say that it rotates a quarter of each head, as Qwen3.5's does."""
    config = json.loads(file.read_text())
    parts = {"partial_rotary_factor": 0.25, "mrope_section": [1, 1, 0], "mrope_interleaved": True}
    file.write_text(json.dumps(config | {"rope_parameters": config["rope_parameters"] | parts}))


def write(folder: Path, target: Target, flags: dict[str, Any]) -> None:
    """Write one drafter, and what it makes of the target's hidden states."""
    given = {"speculator_type": "dspark", "draft_arch": "qwen3", "num_layers": 2, "markov_rank": 6} | flags
    given |= {"verifier_name_or_path": str(target.folder), "mask_token_id": MASK, "block_size": BLOCK}
    given |= {"target_layer_ids": [tap + 1 for tap in TAPS]}  # 0 is the embedding's output
    args = argparse.Namespace(**{**TrainConfig().flatten(), **given})
    d2t, t2d, size = None, None, args.draft_vocab_size or VOCABULARY
    if args.draft_vocab_size:
        frequencies = {token: 100 - token for token in range(1, VOCABULARY, 2)}
        d2t, t2d = build_vocab_mappings_from_distribution(frequencies, size, VOCABULARY)
    model = build_draft_model(args, SpeculatorModel.registry[args.speculator_type], t2d, d2t, size)
    spread(model, keep=("embed_tokens", "lm_head", "verifier"))
    if not args.draft_mrope_full_head_hack:
        install_partial_neox_rotary()  # as training does
    model.save_pretrained(folder)

    loss_mask = torch.zeros(1, len(target.ids), dtype=torch.bool)
    loss_mask[0, list(ANCHORS)] = True
    hidden, logits, _, _, indices = model._backbone_forward(
        target.features(TAPS),
        target.ids[None],
        loss_mask,
        torch.zeros(1, len(target.ids), 32),
        torch.zeros(1, len(target.ids), dtype=torch.long),
        max_anchors=len(ANCHORS),
    )
    assert indices.view(-1, BLOCK)[:, 0].tolist() == list(ANCHORS)
    first = 0 if model.config.sample_from_anchor else 1
    hidden, logits = (tensor.view(len(ANCHORS), BLOCK, -1)[:, first:] for tensor in (hidden, logits))
    head, selector = getattr(model, "markov_head", None), getattr(model, "candidate_selector", None)

    def choose(slot: int, previous: torch.Tensor) -> torch.Tensor:
        if selector is not None:
            candidates, scores = selector.select(logits[:, slot], hidden[:, slot], previous[:, slot])
            return candidates.gather(1, scores.argmax(1)[:, None])[:, 0]
        bias = 0 if head is None else head.block_bias(prev_token_ids=previous, hidden_states=hidden)[:, slot]
        drafts = (logits[:, slot] + bias).argmax(1)
        return drafts if model.d2t is None else drafts + model.d2t[drafts]

    anchors = target.ids[list(ANCHORS)]
    tokens = walk(anchors, hidden.shape[1], choose)
    confidence = None
    if getattr(model, "confidence_head", None) is not None:
        features = [hidden]
        if model.config.confidence_head_with_markov:
            features.append(head.prev_embeddings(torch.cat([anchors[:, None], tokens[:, :-1]], dim=1)))
        confidence = model.confidence_head(torch.cat(features, dim=-1))
    keep(folder, target, hidden, logits, tokens, confidence)


if __name__ == "__main__":
    root = Path(sys.argv[1])
    with torch.no_grad():
        for name, flags in CASES.items():
            given = make_target(root / "target")
            if "draft_mrope_full_head_hack" in flags:
                rotate_parts(given.folder / "config.json")
            write(root / name, given, flags)
