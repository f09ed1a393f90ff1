"""Writes the golden target in several quantisation methods, and LoRA adapters of it.

That in int8 is for ``server/patches/int8_method.py``; the adapters are large enough to change texts.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from golden_server import TARGET, golden_target
from safetensors.torch import load_file, save_file

GROUP = 128  # inputs that share a scale in four bits
CALIBRATED = 64.0  # the largest input of a layer that a fixed scale was made for
AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)  # outputs of an int32, from its lowest bits
IN_ORDER = tuple(range(8))
Tensors = dict[str, torch.Tensor]


@dataclass(frozen=True)
class Method:
    """A quantisation method.

    Attributes:
        config: ``quantization_config`` of config.json.
        tensors: what is stored of a weight [out, in], by the last part of its name.
    """

    config: Mapping[str, Any]
    tensors: Callable[[torch.Tensor], Tensors]


def quantised_target(folder: Path, name: str) -> Path:
    """A target of one of ``METHODS``; returns its folder."""
    method = METHODS[name]
    path = golden_target(folder, quantization_config=dict(method.config))
    stored: Tensors = {}
    for key, tensor in load_file(path / "model.safetensors").items():
        if is_quantised(key):
            parts = method.tensors(tensor.float())
            stored |= {f"{key.removesuffix('weight')}{part}": value.contiguous() for part, value in parts.items()}
        else:
            stored[key] = tensor
    save_file(stored, path / "model.safetensors", metadata={"format": "pt"})
    return path


def is_quantised(key: str) -> bool:
    """Return whether the tensor of this name is a weight of attention or of an MLP."""
    return key.endswith("_proj.weight")


def packed(codes: torch.Tensor, order: Sequence[int]) -> torch.Tensor:
    """[..., n] codes of four bits -> [..., n / 8] int32; a word has code ``order[i]`` of eight from bit 4i on."""
    eights = codes.long().unflatten(-1, (-1, 8))[..., list(order)]
    return (eights << 4 * torch.arange(8)).sum(-1).to(torch.uint32).view(torch.int32)


def _of_rows(dtype: torch.dtype) -> Callable[[torch.Tensor], Tensors]:
    """Eight bits with a scale per output, [out, 1]."""

    def tensors(weight: torch.Tensor) -> Tensors:
        scale = weight.abs().amax(dim=1, keepdim=True) / _largest(dtype)
        return {"weight": _rounded(weight / scale, dtype), "weight_scale": scale}

    return tensors


def _of_tensor(weight: torch.Tensor) -> Tensors:
    """Floats of eight bits with one scale; that of the activations is fixed."""
    scale = weight.abs().max() / _largest(torch.float8_e4m3fn)
    return {
        "weight": _rounded(weight / scale, torch.float8_e4m3fn),
        "weight_scale": scale,
        "input_scale": torch.tensor(CALIBRATED / _largest(torch.float8_e4m3fn)),
    }


def _largest(dtype: torch.dtype) -> float:
    return float(torch.finfo(dtype).max if dtype.is_floating_point else torch.iinfo(dtype).max)


def _rounded(values: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    return (values if dtype.is_floating_point else values.round()).to(dtype)


def _groups(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Codes [out, in] from 1 to 15, of which 8 stands for zero, and scales [out, in / GROUP]."""
    parts = weight.unflatten(1, (-1, GROUP))
    scales = parts.abs().amax(dim=-1, keepdim=True) / 7
    return ((parts / scales).round() + 8).flatten(1), scales.squeeze(-1)


def _compressed(weight: torch.Tensor) -> Tensors:
    """Words [out, in / 8]."""
    codes, scales = _groups(weight)
    shape = torch.tensor(weight.shape)
    return {"weight_packed": packed(codes, IN_ORDER), "weight_scale": scales, "weight_shape": shape}


def _awq(weight: torch.Tensor) -> Tensors:
    """Words [in, out / 8], scales and zeros by group of inputs."""
    codes, scales = _groups(weight)
    zeros = torch.full_like(scales.T, 8)
    return {"qweight": packed(codes.T, AWQ_ORDER), "qzeros": packed(zeros, AWQ_ORDER), "scales": scales.T.half()}


def _gptq(weight: torch.Tensor) -> Tensors:
    """Words [in / 8, out], scales and zeros by group of inputs."""
    codes, scales = _groups(weight)
    zeros = torch.full_like(scales.T, 8 - 1)  # this format holds one less
    return {
        "qweight": packed(codes, IN_ORDER).T,
        "qzeros": packed(zeros, IN_ORDER),
        "scales": scales.T.half(),
        "g_idx": torch.arange(weight.shape[1], dtype=torch.int32) // GROUP,
    }


def _compressed_config(form: str, weights: Mapping[str, Any], activations: Mapping[str, Any] | None) -> dict[str, Any]:
    def scheme(part: Mapping[str, Any]) -> dict[str, Any]:
        return {"symmetric": True, "dynamic": False, **part}

    group = {
        "targets": ["Linear"],
        "weights": scheme(weights),
        "input_activations": None if activations is None else scheme(activations),
    }
    return {
        "quant_method": "compressed-tensors",
        "format": form,
        "quantization_status": "compressed",
        "config_groups": {"group_0": group},
        "ignore": ["lm_head"],
    }


def _eight_bits(kind: str) -> dict[str, Any]:
    form = "float-quantized" if kind == "float" else "int-quantized"
    weights = {"num_bits": 8, "type": kind, "strategy": "channel"}
    return _compressed_config(form, weights, {"num_bits": 8, "type": kind, "strategy": "token", "dynamic": True})


FOUR_BITS = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": GROUP}
METHODS = {
    "compressed-tensors-fp8": Method(_eight_bits("float"), _of_rows(torch.float8_e4m3fn)),
    "compressed-tensors-int8": Method(_eight_bits("int"), _of_rows(torch.int8)),
    "compressed-tensors-int4": Method(_compressed_config("pack-quantized", FOUR_BITS, None), _compressed),
    "w8a8_int8": Method({"quant_method": "w8a8_int8"}, _of_rows(torch.int8)),
    "w8a8_fp8": Method({"quant_method": "w8a8_fp8"}, _of_rows(torch.float8_e4m3fn)),
    "modelopt_fp8": Method({"quant_method": "modelopt", "quant_algo": "FP8", "ignore": ["lm_head"]}, _of_tensor),
    "awq": Method({"quant_method": "awq", "bits": 4, "group_size": GROUP, "zero_point": True, "version": "gemm"}, _awq),
    "gptq": Method(
        {"quant_method": "gptq", "bits": 4, "group_size": GROUP, "desc_act": False, "sym": True, "lm_head": False},
        _gptq,
    ),
}


OF_ROWS = {"self_attn": "token", "mlp": "tensor", "lm_head": "token"}
"""Scales by which a row's result is its own: of every token, and one that is fixed."""


def int8_target(folder: Path, scales: dict[str, str]) -> Path:
    """A target with these scales of its activations, by part of the layer's name; returns its folder."""
    asked = {"quant_method": "test_int8", "scales": scales}
    # An LM head that is the embedding is not quantised.
    path = golden_target(folder, quantization_config=asked, tie_word_embeddings="lm_head" not in scales)
    if "lm_head" in scales:
        tensors = load_file(path / "model.safetensors")
        tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
        save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})
    return path


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
