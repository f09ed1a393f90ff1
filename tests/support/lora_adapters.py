"""LoRA adapters of the golden target with random weights, large enough to change its texts."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from golden_server import TARGET
from safetensors.torch import save_file

RANKS = {"red": 4, "green": 8, "blue": 2, "grey": 4}
"""Adapters by name, of unequal ranks. With requests that name none, one kind more than the servers below hold."""
PLACES = len(RANKS)

_CONFIG = json.loads((TARGET / "config.json").read_text())
_HEADS = _CONFIG["head_dim"] * _CONFIG["num_attention_heads"]
_KV_HEADS = _CONFIG["head_dim"] * _CONFIG["num_key_value_heads"]
_HIDDEN, _INNER = _CONFIG["hidden_size"], _CONFIG["intermediate_size"]
_MODULES = {  # inputs, outputs
    "self_attn.q_proj": (_HIDDEN, _HEADS),
    "self_attn.k_proj": (_HIDDEN, _KV_HEADS),
    "self_attn.v_proj": (_HIDDEN, _KV_HEADS),
    "self_attn.o_proj": (_HEADS, _HIDDEN),
    "mlp.gate_proj": (_HIDDEN, _INNER),
    "mlp.up_proj": (_HIDDEN, _INNER),
    "mlp.down_proj": (_INNER, _HIDDEN),
}


def written_adapter(folder: Path, rank: int, seed: int) -> Path:
    """An adapter of all linear layers in the files of PEFT; returns ``folder``."""
    noise = torch.Generator().manual_seed(seed)
    tensors = {}
    for layer in range(_CONFIG["num_hidden_layers"]):
        for module, (inputs, outputs) in _MODULES.items():
            name = f"base_model.model.model.layers.{layer}.{module}"
            tensors[f"{name}.lora_A.weight"] = torch.randn(rank, inputs, generator=noise) / inputs**0.5
            tensors[f"{name}.lora_B.weight"] = 0.2 * torch.randn(outputs, rank, generator=noise) / rank**0.5
    folder.mkdir(parents=True, exist_ok=True)
    save_file(tensors, folder / "adapter_model.safetensors")
    config = {
        "peft_type": "LORA",
        "r": rank,
        "lora_alpha": 2 * rank,
        "target_modules": [module.partition(".")[2] for module in _MODULES],
        "base_model_name_or_path": str(TARGET),
    }
    (folder / "adapter_config.json").write_text(json.dumps(config))
    return folder


def adapter_flags(folder: Path, backend: str) -> tuple[str, ...]:
    """Flags of a server with these adapters, which are written below ``folder``."""
    paths = [f"{name}={written_adapter(folder / name, rank, seed)}" for seed, (name, rank) in enumerate(RANKS.items())]
    return ("--enable-lora", "--lora-backend", backend, "--max-loras-per-batch", str(PLACES), "--lora-paths", *paths)
