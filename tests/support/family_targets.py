"""Tiny targets of many families with random weights, and what transformers says of texts: no code of ours is in it.

Weights are spread so widely that next to no two logits, and no two experts' scores, are close.
"""

from __future__ import annotations

import json
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
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
EXPERTS = {"num_experts_per_tok": 2, "moe_intermediate_size": 32}


@dataclass(frozen=True)
class Tiny:
    """Class, configuration and weights of a tiny target.

    Attributes:
        model: class of transformers.
        config: fields of the configuration on top of ``COMMON``.
        written: what config.json says on top of that, for readers other than transformers.
        chosen: experts by token; 0 for dense targets.
        vision: configuration of what reads images.
        router_std: of the routers' weights.
        transposed: whether published checkpoints have the experts of a layer in one tensor, transposed.
        suppressed: tokens that are never written, whatever their logits.
    """

    model: str
    config: Mapping[str, Any] = field(default_factory=dict)
    written: Mapping[str, Any] = field(default_factory=dict)
    chosen: int = 0
    vision: Mapping[str, Any] | None = None
    router_std: float = 1.0
    transposed: bool = False
    suppressed: tuple[int, ...] = ()


_MROPE = {
    "rope_parameters": {
        "rope_type": "default",
        "rope_theta": 1e4,
        "mrope_section": [4, 4, 4],
        "mrope_interleaved": True,
    }
}
_QWEN3_VISION = {
    "depth": 1,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_heads": 2,
    "out_hidden_size": 64,
    "num_position_embeddings": 16,
    "deepstack_visual_indexes": [0],
}

TINY: dict[str, Tiny] = {
    "LlamaForCausalLM": Tiny("LlamaForCausalLM", {"attention_bias": True}),
    "Qwen3ForCausalLM": Tiny("Qwen3ForCausalLM", {"tie_word_embeddings": True}),
    "Qwen3MoeForCausalLM": Tiny(
        "Qwen3MoeForCausalLM", {**EXPERTS, "num_experts": 8, "norm_topk_prob": True}, {"num_experts": 8}, chosen=2
    ),
    "MistralForCausalLM": Tiny("MistralForCausalLM", {"sliding_window": None}),
    "Ministral3ForCausalLM": Tiny(
        "Ministral3ForCausalLM",
        {
            "sliding_window": None,
            "rope_parameters": {
                "rope_type": "yarn",
                "rope_theta": 1e4,
                "factor": 16.0,
                "original_max_position_embeddings": 16,
                "llama_4_scaling_beta": 0.1,
                "beta_fast": 32.0,
                "beta_slow": 1.0,
            },
            "max_position_embeddings": 256,
        },
        {"original_max_position_embeddings": 16},
    ),
    "Phi3ForCausalLM": Tiny("Phi3ForCausalLM", {"sliding_window": None, "rope_parameters": None, "head_dim": 16}),
    "InternLM3ForCausalLM": Tiny("LlamaForCausalLM", {}, {"architectures": ["InternLM3ForCausalLM"]}),
    "Qwen2ForCausalLM": Tiny("Qwen2ForCausalLM", {"tie_word_embeddings": True, "head_dim": 16}),
    "Glm4MoeForCausalLM": Tiny(
        "Glm4MoeForCausalLM",
        {
            **EXPERTS,
            "n_routed_experts": 8,
            "n_shared_experts": 1,
            "n_group": 1,
            "topk_group": 1,
            "first_k_dense_replace": 1,
            "partial_rotary_factor": 0.5,
            "attention_bias": True,
            "use_qk_norm": True,
            "head_dim": 16,
            "routed_scaling_factor": 1.5,
        },
        chosen=2,
        router_std=0.2,  # experts are chosen by sigmoids
    ),
    "ApertusForCausalLM": Tiny("ApertusForCausalLM", {"hidden_act": "xielu", "head_dim": 16}),
    "Qwen2MoeForCausalLM": Tiny(
        "Qwen2MoeForCausalLM",
        {**EXPERTS, "num_experts": 8, "shared_expert_intermediate_size": 48, "decoder_sparse_step": 1, "head_dim": 16},
        {"num_experts": 8},
        chosen=2,
    ),
    "GptOssForCausalLM": Tiny(
        "GptOssForCausalLM",
        {
            "num_local_experts": 8,
            "num_experts_per_tok": 2,
            "sliding_window": 8,
            "rope_parameters": {
                "rope_type": "yarn",
                "rope_theta": 1e4,
                "factor": 16.0,
                "original_max_position_embeddings": 16,
                "beta_fast": 32.0,
                "beta_slow": 1.0,
                "truncate": False,
            },
            "max_position_embeddings": 256,
        },
        {"swiglu_limit": 7.0},
        chosen=2,
    ),
    "Mistral3ForConditionalGeneration": Tiny(
        "Mistral3ForConditionalGeneration",
        {"sliding_window": None, "model_type": "mistral"},
        vision={
            "model_type": "pixtral",
            "hidden_size": 32,
            "intermediate_size": 48,
            "num_hidden_layers": 1,
            "num_attention_heads": 2,
            "head_dim": 16,
            "image_size": 112,
            "patch_size": 14,
        },
    ),
    "Qwen2_5_VLForConditionalGeneration": Tiny(
        "Qwen2_5_VLForConditionalGeneration",
        {
            "head_dim": 16,
            "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 3, 3]},
            "model_type": "qwen2_5_vl_text",
        },
        vision={"depth": 1, "hidden_size": 32, "intermediate_size": 48, "num_heads": 2, "out_hidden_size": 64},
    ),
    "Qwen3VLForConditionalGeneration": Tiny("Qwen3VLForConditionalGeneration", _MROPE, vision=_QWEN3_VISION),
    "Qwen3VLMoeForConditionalGeneration": Tiny(
        "Qwen3VLMoeForConditionalGeneration",
        {**_MROPE, **EXPERTS, "num_experts": 8, "norm_topk_prob": True, "decoder_sparse_step": 1},
        chosen=2,
        # As many as SGLang takes for granted here.
        vision={**_QWEN3_VISION, "depth": 3, "deepstack_visual_indexes": [0, 1, 2]},
        transposed=True,
    ),
}

# Two kinds of layers, the last two of which read the K/V of earlier ones; on those that see everything V is K.
_GEMMA4: dict[str, Any] = {
    "layer_types": [f"{kind}_attention" for kind in ("sliding", "full", "sliding", "sliding", "full")],
    "num_kv_shared_layers": 2,
    "use_double_wide_mlp": True,
    "sliding_window": 8,
    "head_dim": 16,
    "global_head_dim": 32,
    "num_key_value_heads": 2,
    "num_global_key_value_heads": 1,
    "attention_k_eq_v": True,
    "hidden_size_per_layer_input": 12,
    "vocab_size_per_layer_input": 256,
    "final_logit_softcapping": 10.0,
    "tie_word_embeddings": True,
    "bos_token_id": 2,
}
TINY["Gemma4ForConditionalGeneration"] = Tiny(
    "Gemma4ForConditionalGeneration",
    _GEMMA4,
    vision={
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "position_embedding_size": 64,
    },
)
GEMMA4_EXPERTS = "Gemma 4 with experts"
TINY[GEMMA4_EXPERTS] = replace(
    TINY["Gemma4ForConditionalGeneration"],
    config={**_GEMMA4, "enable_moe_block": True, "num_experts": 8, "top_k_experts": 2, "moe_intermediate_size": 32},
    chosen=2,
)

# The 12B reads pictures without an encoder; it never writes the marks of their end and of sounds' ends.
_PATCHES = {"patch_size": 4, "pooling_kernel_size": 2, "mm_embed_dim": 64, "mm_posemb_size": 64, "output_proj_dims": 64}
_ENDS = (251, 254)
TINY["Gemma4UnifiedForConditionalGeneration"] = Tiny(
    "Gemma4UnifiedForConditionalGeneration",
    {**_GEMMA4, "num_kv_shared_layers": 0, "use_double_wide_mlp": False, "hidden_size_per_layer_input": 0},
    {
        "vision_config": {**_PATCHES, "model_patch_size": 8, "model_type": "gemma4_unified_vision"},
        "eoi_token_id": _ENDS[0],
        "eoa_token_id": _ENDS[1],
        "eoa_token_index": _ENDS[1],
    },
    vision=_PATCHES,
    suppressed=_ENDS,
)

_RECURRENT: dict[str, Any] = {
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 12,
    "linear_value_head_dim": 20,
    "full_attention_interval": 2,  # as SGLang reads it
    "layer_types": ["linear_attention", "full_attention", "linear_attention", "full_attention", "linear_attention"],
    "head_dim": 32,
    "rope_parameters": {
        "rope_type": "default",
        "rope_theta": 1e4,
        "partial_rotary_factor": 0.25,  # of published models; SGLang reads it elsewhere, and has this by default
        "mrope_section": [2, 1, 1],
        "mrope_interleaved": True,
    },
}
_ROUTED = {**EXPERTS, "num_experts": 8, "shared_expert_intermediate_size": 48}
_ROPE = {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.25}
TINY |= {
    "Qwen3NextForCausalLM": Tiny("Qwen3NextForCausalLM", {**_RECURRENT, **_ROUTED, "rope_parameters": _ROPE}, chosen=2),
    "Qwen3_5MoeForCausalLM": Tiny("Qwen3_5MoeForCausalLM", {**_RECURRENT, **_ROUTED}, chosen=2),
    "Qwen3_5ForCausalLM": Tiny("Qwen3_5ForCausalLM", _RECURRENT),
    "Qwen3_5ForConditionalGeneration": Tiny(
        "Qwen3_5ForConditionalGeneration", _RECURRENT, vision=_QWEN3_VISION | {"deepstack_visual_indexes": []}
    ),
    "Qwen3_5MoeForConditionalGeneration": Tiny(
        "Qwen3_5MoeForConditionalGeneration",
        {**_RECURRENT, **_ROUTED},
        chosen=2,
        vision=_QWEN3_VISION | {"deepstack_visual_indexes": []},
    ),
}

_ROUTER_WEIGHTS = ("gate.weight", "router.weight", "router.proj.weight")

NUM_TOKENS = 20
"""Of the greedy continuations of ``PROMPTS``."""


def _prompts() -> list[list[int]]:
    draw = random.Random(5)
    return [draw.choices(range(2, COMMON["vocab_size"]), k=length) for length in (3, 17, 40)]


PROMPTS = _prompts()

SEEDS: dict[str, int] = {
    "LlamaForCausalLM": 11,
    "Qwen3ForCausalLM": 15,
    "Qwen3MoeForCausalLM": 11,
    "MistralForCausalLM": 14,
    "Ministral3ForCausalLM": 11,
    "Phi3ForCausalLM": 13,
    "InternLM3ForCausalLM": 14,
    "Qwen2ForCausalLM": 12,
    "Glm4MoeForCausalLM": 18,
    "ApertusForCausalLM": 29,
    "Qwen2MoeForCausalLM": 11,
    "GptOssForCausalLM": 24,
    "Gemma4ForConditionalGeneration": 11,
    GEMMA4_EXPERTS: 11,
    "Gemma4UnifiedForConditionalGeneration": 11,
    "Mistral3ForConditionalGeneration": 12,
    "Qwen2_5_VLForConditionalGeneration": 22,
    "Qwen3VLForConditionalGeneration": 13,
    "Qwen3VLMoeForConditionalGeneration": 11,
    "Qwen3NextForCausalLM": 11,
    "Qwen3_5MoeForCausalLM": 12,
    "Qwen3_5ForCausalLM": 12,
    "Qwen3_5ForConditionalGeneration": 11,
    "Qwen3_5MoeForConditionalGeneration": 11,
}
"""Such that no token of these continuations, and no expert, is chosen narrowly."""


def write_target(architecture: str, folder: Path) -> Any:
    """Write one of ``TINY`` into ``folder``, and return the model of transformers, float32."""
    tiny = TINY[architecture]
    cls = getattr(transformers, tiny.model)
    text = {**COMMON, **tiny.config}
    parts = text if tiny.vision is None else {"text_config": text, "vision_config": dict(tiny.vision)}
    tied = {"tie_word_embeddings": text["tie_word_embeddings"]}
    config = cls.config_class(**parts, **({} if tiny.vision is None else tied))
    config._attn_implementation = config._experts_implementation = "eager"
    torch.manual_seed(SEEDS[architecture])
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
