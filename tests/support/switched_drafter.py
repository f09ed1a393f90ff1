"""Drafters of random weights with one kind of switch each, in the canonical form."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from canonical_drafter import config_json, random_tensors
from safetensors.torch import save_file
from switches import SWITCHES

# Attention that looks hard at few rows and says much, or the switches would change next to nothing.
_SPREAD = {"q_norm": 3, "k_norm": 3, "o_proj.weight": 3, "attention_sink_bias": 20}


def switched_drafter(
    folder: Path, kind: str, *, proposed: Sequence[int], likely: Sequence[int] = (), **shape: Any
) -> Path:
    """Write a checkpoint; returns ``folder``.

    Args:
        kind: key of ``SWITCHES``.
        proposed: ids of the proposed tokens, where the kind has a reduced vocabulary.
        likely: the only tokens that it drafts; none for all.
        shape: other keys of config.json.
    """
    config = config_json(**shape, **SWITCHES[kind])
    tokens = torch.arange(config["vocab_size"])
    if "draft_vocab_size" in config:
        config["draft_vocab_size"] = len(proposed)
        tokens = torch.tensor(proposed)
        content = {"version": 1, "token_ids": list(proposed)}
        (folder / "draft_vocabulary.json").write_text(json.dumps(content))
    (folder / "config.json").write_text(json.dumps(config))
    tensors = random_tensors(config, seed=5)
    for name in tensors:
        tensors[name] *= next((factor for part, factor in _SPREAD.items() if part in name), 1)
    if likely:
        _forbid(tensors, ~torch.isin(tokens, torch.tensor(likely)))
    save_file(tensors, folder / "model.safetensors")
    return folder


def _forbid(tensors: dict[str, torch.Tensor], forbidden: torch.Tensor) -> None:
    """One channel stays the same from embedding to LM head, which has a large weight there for these rows."""
    tensors["embed_tokens.weight"][:, 0] = 4
    for name, tensor in tensors.items():
        if "o_proj" in name or "down_proj" in name:
            tensor[0] = 0
    tensors["norm.weight"][0] = 1
    tensors["lm_head.weight"][:, 0] = torch.where(forbidden, -20.0, 0.0)
