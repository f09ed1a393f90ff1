"""The golden target in int8, see ``server/patches/int8_method.py``."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

from golden_server import TARGET
from safetensors.torch import load_file, save_file

OF_ROWS = {"self_attn": "token", "mlp": "tensor", "lm_head": "token"}
"""Scales by which a row's result is its own: of every token, and one that is fixed."""


def int8_target(folder: Path, scales: dict[str, str]) -> Path:
    """A target with these scales of its activations, by part of the layer's name; returns its folder."""
    path = folder / "target"
    shutil.copytree(TARGET, path, dirs_exist_ok=True)
    config = json.loads((path / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "test_int8", "scales": scales}
    if "lm_head" in scales:  # an LM head that is the embedding is not quantised
        config["tie_word_embeddings"] = False
        tensors = load_file(path / "model.safetensors")
        tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
        save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})
    (path / "config.json").write_text(json.dumps(config))
    return path
