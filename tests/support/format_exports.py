"""One canonical drafter written in the formats of others: ``export(config, tensors) -> (config, tensors)`` each."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from canonical_drafter import config_json, random_tensors

Config = dict[str, Any]
Tensors = dict[str, torch.Tensor]
Export = Callable[[Config, Tensors], tuple[Config, Tensors]]

_FILES = json.loads((Path(__file__).parents[1] / "data" / "trainer_files.json").read_text())
REAL: dict[tuple[str, str], dict[str, Any]] = {(file["trainer"], file["drafter"]): file for file in _FILES}
"""Trainer and drafter -> ``config`` and ``shapes`` as the trainer wrote them, by benchmarks/trainers at 0cd78b18."""

LAYER_KEYS = (
    "attention_bias hidden_act hidden_size intermediate_size num_hidden_layers num_attention_heads num_key_value_heads "
    "head_dim vocab_size rms_norm_eps max_position_embeddings"
).split()
HEAD_KEYS = "markov_rank markov_head_type enable_confidence_head confidence_head_with_markov".split()
FLAT = {
    "markov_head.markov_w1.weight": "markov_w1.weight",
    "markov_head.markov_w2.weight": "markov_w2.weight",
    "markov_head.gate_proj.weight": "gate_proj.weight",
    "markov_head.gate_proj.bias": "gate_proj.bias",
    "markov_head.joint_proj.weight": "joint_proj.weight",
    "markov_head.joint_proj.bias": "joint_proj.bias",
    "confidence_head.proj.weight": "confidence_proj.weight",
    "confidence_head.proj.bias": "confidence_proj.bias",
}

NO_HEADS = {
    "markov_rank": 0,
    "markov_head_type": ...,
    "enable_confidence_head": False,
    "confidence_head_with_markov": ...,
}
DFLASH = NO_HEADS | {"sample_from_anchor": False, "block_size": 6}
DFLASH2 = {
    "markov_head_type": "selector",
    "selector_top_k": 4,
    "conv_kernel_size": 2,
    "conv_group_size": 4,
    "enable_confidence_head": False,
    "confidence_head_with_markov": ...,
    "sample_from_anchor": False,
}
SELECTOR = {
    "markov_head.markov_w1.weight": "candidate_selector.predecessor_codebook",
    "markov_head.markov_w2.weight": "candidate_selector.successor_codebook",
    "markov_head.hidden_projection.weight": "candidate_selector.hidden_projection.weight",
}
BARE_CONFIDENCE = {"confidence_head_with_markov": False}
YARN = {
    "rope_parameters": {"rope_theta": 500.0, "rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16}
}
WINDOW = {"layer_types": ["full_attention", "sliding_attention"], "sliding_window": 4, "window_from_anchor": True}


def without_embeddings(tensors: Tensors) -> Tensors:
    return {name: t for name, t in tensors.items() if name not in ("embed_tokens.weight", "lm_head.weight")}


def completed(content: Config, trainer: str, drafter: str = "dspark") -> Config:
    """The content with what the trainer writes next to it: the keys of a real file that it lacks, in all sections."""
    real = REAL[trainer, drafter]["config"]
    nested = {key: value | content[key] for key, value in real.items() if isinstance(content.get(key), dict)}
    return real | content | nested


def content_of(export: Export, **overrides: Any) -> tuple[Config, Tensors]:
    """Configuration and tensors of a drafter in this format, without what it shares with the target."""
    config = config_json(**overrides)
    return export(config, without_embeddings(random_tensors(config, seed=0)))


def shuffled_taps(ids: list[int], tensors: Tensors) -> tuple[list[int], Tensors]:
    """The taps in another order, and the column blocks of fc with them."""
    order = [*range(1, len(ids)), 0]
    blocks = tensors["fc.weight"].chunk(len(ids), dim=1)
    return [ids[i] for i in order], tensors | {"fc.weight": torch.cat([blocks[i] for i in order], dim=1)}


def neighbouring_pairs(config: Config, tensors: Tensors) -> Tensors:
    """Rows of queries and keys such that RoPE turns channels 2i and 2i + 1 of a head."""
    head_dim, changed = config["head_dim"], {}
    order = [channel for i in range(head_dim // 2) for channel in (i, i + head_dim // 2)]
    for name, tensor in tensors.items():
        if "_norm" in name and "self_attn" in name:
            changed[name] = tensor[order]
        elif "q_proj" in name or "k_proj" in name:
            changed[name] = torch.cat([head[order] for head in tensor.split(head_dim)])
    return tensors | changed


def layers(config: Config) -> Config:
    """The keys of the Qwen3 layers, as transformers 4 writes them."""
    kept = {key: config[key] for key in LAYER_KEYS}
    rope = dict(config["rope_parameters"])
    kept |= {"model_type": "qwen3", "rope_theta": rope.pop("rope_theta"), "rope_scaling": None}
    if rope.get("rope_type") != "default":
        kept["rope_scaling"] = rope
    if sinks := config.get("sink_layers"):
        kept |= {"attention_sink_bias": True} if all(sinks) else {}  # tensors tell the layers otherwise
    if (scale := config.get("attention_value_scale", 1.0)) != 1:
        kept["attention_value_scale"] = scale
    if cap := config.get("final_logit_softcapping"):
        kept["final_logit_softcapping"] = cap
    return kept | {"layer_types": config["layer_types"], "num_target_layers": config["num_target_layers"]}


def deepspec(config: Config, tensors: Tensors) -> tuple[Config, Tensors]:
    return config, tensors


def ling(config: Config, tensors: Tensors) -> tuple[Config, Tensors]:
    renamed = {f"model.{name}": tensor for name, tensor in tensors.items()}
    return config | {"architectures": ["LingDSparkModel"], "num_experts": 64, "moe_intermediate_size": 8}, renamed


def hoisted(config: Config, tensors: Tensors) -> tuple[Config, Tensors]:
    """SpecForge's file after its own script has half rewritten it."""
    nested = {key: config[key] for key in ("target_layer_ids", "mask_token_id")}
    kept = {key: value for key, value in config.items() if key not in nested}
    return kept | {"dflash_config": nested | {"projector_type": "dspark"}}, without_embeddings(tensors)


def specforge(config: Config, tensors: Tensors) -> tuple[Config, Tensors]:
    nested = {key: config[key] for key in (*HEAD_KEYS, "target_layer_ids", "mask_token_id") if key in config}
    nested |= {"projector_type": "dspark", "attention_mode": "gqa", "confidence_head_alpha": 1.0}
    content = layers(config) | {"architectures": ["DSparkDraftModel"], "block_size": config["block_size"]}
    content |= {"dflash_config": nested, "rope_parameters": config["rope_parameters"]}
    content["draft_vocab_size"] = config.get("draft_vocab_size") or config["vocab_size"]
    if config.get("sliding_window"):
        content |= {"sliding_window": config["sliding_window"], "use_sliding_window": True}
    return completed(content, "SpecForge"), without_embeddings(tensors)


def specforge_two_sections(config: Config, tensors: Tensors) -> tuple[Config, Tensors]:
    """Heads in a section of their own, and in tensors below an old name."""
    content, tensors = specforge(config, tensors)
    nested = content["dflash_config"]
    heads = {key: nested.pop(key) for key in HEAD_KEYS if key in nested}
    renamed = {("logit_head." if "head" in name else "") + name: tensor for name, tensor in tensors.items()}
    return content | {"dspark_config": heads}, renamed


def modelopt(config: Config, tensors: Tensors) -> tuple[Config, Tensors]:
    ids, tensors = shuffled_taps(config["target_layer_ids"], without_embeddings(tensors))
    nested = {key: config[key] for key in ("markov_rank", "markov_head_type", "mask_token_id") if key in config}
    nested |= {"projector_type": "dspark", "shift_label": True, "causal": False, "target_layer_ids": ids}
    nested |= {"use_confidence_head": config["enable_confidence_head"]}
    content = layers(config) | {"architectures": ["DFlashDraftModel"], "block_size": config["block_size"]}
    content = completed(content | {"dflash_config": nested}, "ModelOpt")
    return content, {FLAT.get(name, name): tensor for name, tensor in tensors.items()}


def torchspec(config: Config, tensors: Tensors) -> tuple[Config, Tensors]:
    ids, tensors = shuffled_taps(config["target_layer_ids"], without_embeddings(tensors))
    nested = {"mask_token_id": config["mask_token_id"], "target_layer_ids": ids, "block_size": config["block_size"]}
    # Of the heads only the tensors speak, and the depth is the number of taps.
    content = layers(config) | {"architectures": ["DFlashDraftModel"], "num_target_layers": len(ids) - 2}
    return content | {"dflash_config": nested, "sample_from_anchor": config.get("sample_from_anchor", True)}, tensors


def dflash(config: Config, tensors: Tensors) -> tuple[Config, Tensors]:
    """A plain DFlash drafter; its layout and that it has no heads go without saying."""
    nested = {"mask_token_id": config["mask_token_id"], "target_layer_ids": config["target_layer_ids"]}
    content = layers(config) | {"architectures": ["DFlashDraftModel"], "tie_word_embeddings": True}
    return content | {"block_size": config["block_size"], "dflash_config": nested}, without_embeddings(tensors)


def jetspec(config: Config, tensors: Tensors) -> tuple[Config, Tensors]:
    """DFlash's file, whose blocks are causal in all layers."""
    content, tensors = dflash(config, tensors)
    content["dflash_config"] |= {"causal_head": True, "target_hidden_size": config["hidden_size"]}
    return content, tensors


def selector(config: Config) -> Config:
    """The keys of DFlash 2."""
    kept = {key: config[key] for key in ("conv_kernel_size", "conv_group_size", "selector_top_k")}
    return kept | {"selector_rank": config["markov_rank"]}


def dflash2(config: Config, tensors: Tensors) -> tuple[Config, Tensors]:
    """Z-lab's file: 0 stands for no bound of the logits."""
    content, tensors = dflash(config, tensors)
    content["dflash_config"] |= selector(config) | {"final_logit_softcapping": 0.0}
    content["dflash_config"] |= {key: config[key] for key in ("output_multiplier",) if key in config}
    return content | {"architectures": ["DFlash2DraftModel"], "is_causal": False}, {
        SELECTOR.get(name, name): tensor for name, tensor in tensors.items()
    }


def speculators(config: Config, tensors: Tensors) -> tuple[Config, Tensors]:
    layer = layers(config)
    del layer["num_target_layers"]
    rope = {"rope_theta": layer.pop("rope_theta"), **(layer.pop("rope_scaling") or {"rope_type": "default"})}
    layer |= {"rope_parameters": {"sliding_attention": rope, "full_attention": {"rope_theta": 1.0}}}
    if config.get("sliding_window"):
        layer |= {"sliding_window": config["sliding_window"], "use_sliding_window": True}
    ids, tensors = shuffled_taps([tap + 1 for tap in config["target_layer_ids"]], tensors)
    from_anchor = config.get("sample_from_anchor", True)
    drafts = config["block_size"] - (not from_anchor)
    content = {
        "speculators_model_type": "dspark" if config["markov_rank"] else "dflash",
        "sample_from_anchor": from_anchor,
        "transformer_layer_config": layer,
        "aux_hidden_state_layer_ids": ids,
        "block_size": config["block_size"],
        "mask_token_id": config["mask_token_id"],
        "draft_vocab_size": config.get("draft_vocab_size") or config["vocab_size"],
        "speculators_config": {"proposal_methods": [{"proposal_type": "greedy", "speculative_tokens": drafts}]},
        "sliding_window_non_causal": not any(config.get("causal_layers", [])),
        **{key: config[key] for key in HEAD_KEYS if key in config},
    }
    if config.get("markov_head_type") == "selector":
        content = {key: value for key, value in content.items() if key not in HEAD_KEYS} | selector(config)
        content["speculators_model_type"] = "dflash2"
        tensors = {SELECTOR.get(name, name): tensor for name, tensor in tensors.items()}
    return completed(content, "speculators", content["speculators_model_type"]), without_embeddings(tensors)


def reduced(token_ids: list[int], vocab_size: int) -> Tensors:
    """d2t and t2d of a reduced vocabulary."""
    ids = torch.tensor(token_ids)
    drafted = torch.zeros(vocab_size, dtype=torch.bool)
    drafted[ids] = True
    return {"d2t": ids - torch.arange(len(ids)), "t2d": drafted}


def neighbours(config: Config, tensors: Tensors) -> tuple[Config, Tensors]:
    content, tensors = specforge(config, tensors)
    return content | {"rope_is_neox_style": False}, neighbouring_pairs(config, tensors)


CASES: dict[str, tuple[Export, str, Config]] = {
    "DeepSpec": (deepspec, "DeepSpec", {}),
    "Ling": (ling, "DeepSpec", {}),
    "SpecForge, rewritten": (hoisted, "DeepSpec", {}),
    "SpecForge": (specforge, "SpecForge", {}),
    "SpecForge, rnn": (specforge, "SpecForge", {"markov_head_type": "rnn"}),
    "SpecForge, YaRN": (specforge, "SpecForge", YARN),
    "SpecForge, early": (specforge_two_sections, "SpecForge", {"markov_head_type": "gated"}),
    "ModelOpt": (modelopt, "ModelOpt", {"markov_head_type": "gated"}),
    "TorchSpec": (torchspec, "TorchSpec", {}),
    "TorchSpec, gated": (torchspec, "TorchSpec", {"markov_head_type": "gated"} | BARE_CONFIDENCE),
    "DFlash": (dflash, "DFlash", DFLASH),
    "DFlash, sinks": (dflash, "DFlash", DFLASH | {"sink_layers": [True, True]}),
    "ModelOpt, sinks in one layer": (modelopt, "ModelOpt", {"sink_layers": [False, True]}),
    "TorchSpec, value scale": (torchspec, "TorchSpec", {"attention_value_scale": 0.7}),
    "DFlash, softcap": (dflash, "DFlash", DFLASH | {"final_logit_softcapping": 30.0}),
    "speculators, softcap": (speculators, "speculators", {"final_logit_softcapping": 0.5}),
    "speculators, sinks": (speculators, "speculators", {"sink_layers": [True, True]}),
    "DeepSpec, sinks in one layer": (deepspec, "DeepSpec", {"sink_layers": [True, False]}),
    "speculators": (speculators, "speculators", {}),
    "speculators, DFlash layout": (speculators, "speculators", {"sample_from_anchor": False}),
    "speculators, causal windows": (speculators, "speculators", WINDOW | {"causal_layers": [False, True]}),
    "speculators, reduced vocabulary": (speculators, "speculators", {"draft_vocab_size": 6}),
    "speculators, DFlash": (speculators, "speculators", DFLASH),
    "JetSpec": (jetspec, "DFlash", DFLASH | {"causal_layers": [True, True]}),
    "DFlash 2": (dflash2, "DFlash", DFLASH2 | {"output_multiplier": 0.6}),
    "DFlash 2 of speculators": (speculators, "speculators", DFLASH2),
    "DFlash 2, canonical": (deepspec, "DeepSpec", DFLASH2),
    "speculators, biases": (speculators, "speculators", {"attention_bias": True}),
}
"""Name -> the export, the name of its format, and settings of the drafter."""
