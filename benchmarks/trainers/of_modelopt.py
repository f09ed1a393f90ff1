"""Drafters written by NVIDIA Model Optimizer: its conversion of a target, and the exporter of the converted model.

Its argument is a folder.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import modelopt.torch.speculative as mtsp
import torch
from record import ANCHORS, BLOCK, MASK, TAPS, keep, make_target, spread, walk

LAYERS = {"num_hidden_layers": 3, "target_layer_ids": list(TAPS), "head_dim": 16, "num_attention_heads": 4}
LAYERS |= {"num_key_value_heads": 2, "intermediate_size": 48}
DSPARK = {"projector_type": "dspark", "markov_rank": 6, "use_confidence_head": True}
WINDOW = {"dflash_swa_window_size": 6}
CASES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "dspark": (DSPARK, {}),
    "dspark, gated": (DSPARK | {"markov_head_type": "gated"}, {}),
    "dspark, rnn": (DSPARK | {"markov_head_type": "rnn"}, {}),
    "dspark, no confidence head": (DSPARK | {"use_confidence_head": False}, {}),
    "dspark, windows": (DSPARK, WINDOW),
    "dspark, windows, causal": (DSPARK, WINDOW | {"dflash_draft_attention": "causal"}),
    "dspark, causal": (DSPARK, {"dflash_draft_attention": "causal"}),
    "dspark, sinks": (DSPARK, {"dflash_attention_sink": True}),
    "dspark, biases": (DSPARK | {"attention_bias": True}, {}),
    "dflash": ({}, {}),
    "dflash, windows, sinks": ({}, WINDOW | {"dflash_attention_sink": True}),
}


def write(folder: Path, target_folder: Path, heads: dict[str, Any], options: dict[str, Any]) -> None:
    """Write one drafter, and what it makes of the target's hidden states."""
    # With transformers 5, the drafter trains with that library's default base of RoPE, and the target's is exported.
    target = make_target(target_folder, rope_theta=10_000.0)
    options = {"dflash_architecture_config": LAYERS | heads, "dflash_block_size": BLOCK} | options
    model = mtsp.convert(target.model, [("dflash", options | {"dflash_mask_token_id": MASK})])
    draft = spread(model.dflash_module)
    spread_sinks(draft)
    model.get_exporter().export(folder)

    anchors, kept = torch.tensor([ANCHORS]), torch.ones(1, len(ANCHORS), dtype=torch.bool)
    count, length = len(ANCHORS), len(target.ids)
    hidden = draft(
        noise_embedding=model._build_noise_embedding(target.ids[None], anchors, kept, count),
        target_hidden=target.features(model.target_layer_ids),
        position_ids=model._build_position_ids(length, anchors, "cpu"),
        attention_mask=model._build_draft_attention_mask(
            length, anchors, kept, count, torch.float32, "cpu", window=model.dflash_swa_window_size
        ),
    )
    hidden = hidden.view(count, BLOCK, -1)[:, 0 if heads else 1 :]
    logits, first = model.lm_head(hidden), target.ids[list(ANCHORS)]
    if not heads:
        keep(folder, target, hidden, logits, logits.argmax(-1))
        return
    state: list[Any] = [None]

    def choose(slot: int, previous: torch.Tensor) -> torch.Tensor:
        bias, state[0] = draft.markov_step(previous[:, slot], hidden[:, slot], state[0])
        return (logits[:, slot] + bias).argmax(1)

    tokens, confidence = walk(first, BLOCK, choose), None
    if draft.use_confidence_head:
        confidence = draft.compute_confidence_logits(torch.cat([first[:, None], tokens[:, :-1]], dim=1), hidden)
    keep(folder, target, hidden, logits, tokens, confidence)


def spread_sinks(draft: torch.nn.Module) -> None:
    """Make sinks weigh as much as scores do."""
    for name, parameter in draft.named_parameters():
        if name.endswith("attention_sink_bias"):
            parameter.normal_(1.0, 1.0)


if __name__ == "__main__":
    root = Path(sys.argv[1])
    with torch.no_grad():
        for name, (heads, options) in CASES.items():
            write(root / name, root / "target", heads, options)
