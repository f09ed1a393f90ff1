"""Tiny targets of many families with random weights, and what transformers says of texts: no code of ours is in it.

Weights are spread so widely that next to no two logits, and no two experts' scores, are close.
"""

from __future__ import annotations

import json
import random
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors.torch import load_file, save_file

COMMON: dict[str, Any] = {
    "vocab_size": 256,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 5,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 24,  # not the hidden size by the heads
    "max_position_embeddings": 1024,
    "tie_word_embeddings": False,
    "bos_token_id": None,
    "eos_token_id": 1,
    "pad_token_id": 0,
}
GEMMA4_EXPERTS = "Gemma 4 with experts"


@dataclass(frozen=True)
class Tiny:
    """Class, configuration and weights of a tiny target, see ``data/family_targets.toml``."""

    model: str
    seed: int
    config: Mapping[str, Any]
    written: Mapping[str, Any] = field(default_factory=dict)
    chosen: int = 0
    vision: Mapping[str, Any] | None = None
    router_std: float = 1.0
    transposed: bool = False
    suppressed: tuple[int, ...] = ()


def _tables() -> dict[str, Tiny]:
    tables = tomllib.loads((Path(__file__).parents[1] / "data" / "family_targets.toml").read_text())
    parts = tables.pop("parts")

    def tiny(name: str, table: dict[str, Any]) -> Tiny:
        config = {key: value for part in table.pop("parts", ()) for key, value in parts[part].items()}
        if rope := table.pop("rope", None):
            config["rope_parameters"] = rope
        config |= {key: None if value == "none" else value for key, value in table.pop("config", {}).items()}
        if vision := table.get("vision"):
            table["vision"] = parts.get(vision.pop("part", ""), {}) | vision
        return Tiny(**{"model": name} | table, config=config)

    return {name: tiny(name, table) for name, table in tables.items()}


TINY = _tables()

_ROUTER_WEIGHTS = ("gate.weight", "router.weight", "router.proj.weight")

NUM_TOKENS = 20
"""Of the greedy continuations of ``PROMPTS``."""


def _prompts() -> list[list[int]]:
    draw = random.Random(5)
    return [draw.choices(range(2, COMMON["vocab_size"]), k=length) for length in (3, 17, 40)]


PROMPTS = _prompts()


def write_target(architecture: str, folder: Path) -> Any:
    """Write one of ``TINY`` into ``folder``, and return the model of transformers, float32."""
    tiny = TINY[architecture]
    cls = getattr(transformers, tiny.model)
    text = {**COMMON, **tiny.config}
    parts = text if tiny.vision is None else {"text_config": text, "vision_config": dict(tiny.vision)}
    tied = {"tie_word_embeddings": text["tie_word_embeddings"]}
    config = cls.config_class(**parts, **({} if tiny.vision is None else tied))
    config._attn_implementation = config._experts_implementation = "eager"
    torch.manual_seed(tiny.seed)
    model = cls(config).float().eval()
    _draw(model, tiny, text["hidden_size"])
    model.save_pretrained(folder)
    if tiny.transposed:
        _transpose_experts(folder / "model.safetensors")
    file = folder / "config.json"
    # SGLang makes some layers in this format, whatever --dtype says.
    dtype = "bfloat16" if torch.cuda.is_available() else "float32"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"dtype": dtype} | dict(tiny.written)))
    if tiny.suppressed:
        model.register_forward_hook(lambda module, given, output: _suppress(output.logits, tiny.suppressed))
    return model


def _suppress(logits: torch.Tensor, tokens: Sequence[int]) -> None:
    logits[..., list(tokens)] = torch.finfo(logits.dtype).min


@torch.no_grad()
def _draw(model: Any, tiny: Tiny, hidden_size: int) -> None:
    """Draw the weights and buffers of a model."""
    for name, parameter in model.named_parameters():
        if name.endswith("sinks"):
            parameter.normal_(std=2.0).copy_(parameter.bfloat16())  # what SGLang keeps of them
        elif name.endswith("router.scale"):
            parameter.fill_(hidden_size**0.5)  # its factor becomes 1: SGLang leaves it out on a CPU
        elif name.endswith("A_log"):
            parameter.uniform_(-2.0, 0.5)  # some heads remember long, some do not
        elif name.endswith("conv1d.weight"):
            parameter.normal_(std=0.5)
        elif parameter.ndim == 1:
            parameter.normal_(mean=0.0 if name.endswith("bias") else 1.0, std=0.3)
        else:
            parameter.normal_(std=tiny.router_std if name.endswith(_ROUTER_WEIGHTS) else 0.15)
    for module in model.modules():
        if type(module).__name__ == "XIELUActivation":  # computed in 16 bits everywhere
            module.bfloat16()
    for name, buffer in model.named_buffers():
        if name.endswith("e_score_correction_bias"):
            buffer.normal_(std=0.3)
        elif name.endswith("layer_scalar"):
            buffer.normal_(mean=1.0, std=0.3)


def _transpose_experts(file: Path) -> None:
    tensors = load_file(file)
    experts = {name: tensor.transpose(1, 2).contiguous() for name, tensor in tensors.items() if ".experts." in name}
    save_file(tensors | experts, file, metadata={"format": "pt"})


def written_target(architecture: str, folder: Path) -> Path:
    """Return ``folder``, with one of ``TINY`` in it."""
    write_target(architecture, folder)
    return folder


@torch.no_grad()
def continued(model: Any, prompt: Sequence[int], num_tokens: int) -> list[int]:
    """Return ``prompt`` and its greedy continuation, every token from a forward over the whole text."""
    ids = list(prompt)
    for _ in range(num_tokens):
        ids.append(int(model(torch.tensor([ids]), use_cache=False).logits[0, -1].argmax()))
    return ids


@torch.no_grad()
def outputs_of(model: Any, ids: Sequence[int]) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """Return logits [n, V] and hidden states [n, d]: of the embedding, and of every layer but the last one."""
    output = model(torch.tensor([ids]), use_cache=False, output_hidden_states=True)
    return output.logits[0], [state[0] for state in output.hidden_states[:-1]]
