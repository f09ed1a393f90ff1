"""A tiny random drafter in the canonical form, key by key and tensor by tensor, without the package."""

import json
from typing import Any

import torch

_CONFIG = """\
{"architectures": ["Qwen3DSparkModel"], "model_type": "qwen3", "attention_bias": false, "hidden_act": "silu",
"hidden_size": 24, "intermediate_size": 40, "num_hidden_layers": 2, "layer_types": ["full_attention",
"full_attention"], "num_attention_heads": 6, "num_key_value_heads": 2, "head_dim": 8, "vocab_size": 19,
"rms_norm_eps": 1e-06, "rope_parameters": {"rope_theta": 500.0, "rope_type": "default"},
"max_position_embeddings": 256, "tie_word_embeddings": false, "block_size": 5, "mask_token_id": 3,
"target_layer_ids": [-1, 1, 2], "num_target_layers": 4, "num_anchors": 16, "markov_rank": 7,
"markov_head_type": "vanilla", "enable_confidence_head": true, "confidence_head_with_markov": true}
"""


def config_json(**overrides: Any) -> dict[str, Any]:
    """A valid config.json; pass ``key=...`` (Ellipsis) to leave a key out."""
    content = json.loads(_CONFIG) | overrides
    return {key: value for key, value in content.items() if value is not ...}


GEMMA: dict[str, Any] = {
    "architectures": ["Gemma4DSparkModel"],
    "model_type": "gemma4_unified_text",
    "hidden_act": ...,
    "hidden_activation": "gelu_pytorch_tanh",
    "sliding_window": 4,
    "global_head_dim": 16,
    "num_global_key_value_heads": 1,
    "attention_k_eq_v": True,
    "final_logit_softcapping": 3.0,
    "rope_parameters": {
        "sliding_attention": {"rope_type": "default", "rope_theta": 100.0},
        "full_attention": {"rope_type": "proportional", "rope_theta": 500.0, "partial_rotary_factor": 0.25},
    },
    "num_kv_shared_layers": 0,
    "use_double_wide_mlp": False,
    "use_bidirectional_attention": "vision",
    "target_model_type": "gemma4_unified",
    "target_text_model_type": "gemma4_unified_text",
}
"""Keys of a drafter with Gemma 4's layers, over a copy of its target's; heads of sliding layers have another size."""


def heads_of(config: dict[str, Any]) -> tuple[int, int, bool]:
    """Channels of a head, K/V heads, and whether values have a projection of their own."""
    if "Gemma4DSparkModel" not in config["architectures"]:
        return config["head_dim"], config["num_key_value_heads"], True
    shared = config["attention_k_eq_v"]
    kv_heads = config["num_global_key_value_heads" if shared else "num_key_value_heads"]
    return config["global_head_dim"], kv_heads, not shared


def proposed_tokens(number: int) -> list[int]:
    """Ids of a reduced vocabulary, with holes."""
    return [2 * i + (i > 2) for i in range(number)]


def _convolutions(config: dict[str, Any], layer: str) -> dict[str, tuple[int, ...]]:
    """Shapes of a layer's convolutions, if it has any."""
    taps, d, shapes = config.get("conv_kernel_size", 0), config["hidden_size"], {}
    for conv in ("attention_conv", "mlp_conv") if taps else ():
        shapes[f"{layer}{conv}.base_kernel"] = (2, taps, d)
        shapes[f"{layer}{conv}.kernel_projection.weight"] = (2 * taps * d // config["conv_group_size"], d)
    return shapes


def random_tensors(config: dict[str, Any], seed: int) -> dict[str, torch.Tensor]:
    """Every tensor that DeepSpec stores for this config, float32, large enough that each one matters."""
    d, inner, vocab = (config[k] for k in ("hidden_size", "intermediate_size", "vocab_size"))
    hd, kv_heads, has_values = heads_of(config)
    q, kv = config["num_attention_heads"] * hd, kv_heads * hd
    rank, proposed = config["markov_rank"], config.get("draft_vocab_size") or vocab
    shapes: dict[str, tuple[int, ...]] = {
        "embed_tokens.weight": (vocab, d),
        "lm_head.weight": (proposed, d),
        "fc.weight": (d, len(config["target_layer_ids"]) * d),
        "hidden_norm.weight": (d,),
        "norm.weight": (d,),
    }
    for i in range(config["num_hidden_layers"]):
        shapes |= {
            f"layers.{i}.input_layernorm.weight": (d,),
            f"layers.{i}.post_attention_layernorm.weight": (d,),
            f"layers.{i}.self_attn.q_proj.weight": (q, d),
            f"layers.{i}.self_attn.k_proj.weight": (kv, d),
            f"layers.{i}.self_attn.v_proj.weight": (kv, d),
            f"layers.{i}.self_attn.o_proj.weight": (d, q),
            f"layers.{i}.self_attn.q_norm.weight": (hd,),
            f"layers.{i}.self_attn.k_norm.weight": (hd,),
            f"layers.{i}.mlp.gate_proj.weight": (inner, d),
            f"layers.{i}.mlp.up_proj.weight": (inner, d),
            f"layers.{i}.mlp.down_proj.weight": (d, inner),
        }
        if not has_values:
            del shapes[f"layers.{i}.self_attn.v_proj.weight"]
        if "Gemma4DSparkModel" in config["architectures"]:
            norms = (f"layers.{i}.{when}_feedforward_layernorm.weight" for when in ("pre", "post"))
            shapes |= {**dict.fromkeys(norms, (d,)), f"layers.{i}.layer_scalar": (1,)}
        if config["attention_bias"]:
            widths = {"q_proj": q, "k_proj": kv, "v_proj": kv, "o_proj": d}
            shapes |= {f"layers.{i}.self_attn.{name}.bias": (width,) for name, width in widths.items()}
        shapes |= _convolutions(config, f"layers.{i}.")
        if config.get("sink_layers", [False] * 99)[i]:
            shapes[f"layers.{i}.self_attn.attention_sink_bias"] = (config["num_attention_heads"],)
    if rank:
        shapes |= {"markov_head.markov_w1.weight": (vocab, rank), "markov_head.markov_w2.weight": (proposed, rank)}
        of_kinds: dict[str, dict[str, tuple[int, ...]]] = {
            "selector": {"hidden_projection.weight": (rank, d)},
            "gated": {"gate_proj.weight": (rank, d + rank), "gate_proj.bias": (rank,)},
            "rnn": {"joint_proj.weight": (3 * rank, 2 * rank + d), "joint_proj.bias": (3 * rank,)},
        }
        own = of_kinds.get(config["markov_head_type"], {})
        shapes |= {f"markov_head.{name}": shape for name, shape in own.items()}
    if config["enable_confidence_head"]:
        width = d + (rank if config["confidence_head_with_markov"] else 0)
        shapes |= {"confidence_head.proj.weight": (1, width), "confidence_head.proj.bias": (1,)}
    generator = torch.Generator().manual_seed(seed)
    tensors = {}
    for name, shape in shapes.items():
        scale = 1.0 if len(shape) == 1 or "embed" in name or "markov" in name else shape[-1] ** -0.5
        tensors[name] = torch.randn(shape, generator=generator) * scale + (1.0 if "norm" in name else 0.0)
    return tensors
