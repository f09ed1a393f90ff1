"""Keys of the Qwen3 layers that every format describes, most of them under the same names."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import fields
from typing import Any

from sglang_dspark.draft.checked import REMEDY
from sglang_dspark.draft.config import FULL, SLIDING
from sglang_dspark.draft.formats.content import Content
from sglang_dspark.draft.rope import RopeScaling
from sglang_dspark.errors import CheckpointError

SHAPE = (
    "hidden_size intermediate_size num_hidden_layers num_attention_heads num_key_value_heads head_dim vocab_size "
    "rms_norm_eps max_position_embeddings"
).split()

NEUTRAL: Mapping[str, Any] = {
    "hidden_act": "silu",
    "mlp_bias": False,
    "final_logit_softcapping": None,
    "attn_logit_softcapping": None,
    "output_multiplier": 1,
    "input_embedding_scale": 1,
    "mask_embedding": None,
    "quantization_config": None,
    "compression_config": None,
}
"""Keys that change the network, and the one value that leaves it as it is here."""

SILENT = (
    "architectures auto_map model_type dtype torch_dtype transformers_version attention_dropout initializer_range "
    "use_cache bos_token_id eos_token_id pad_token_id return_dict output_hidden_states output_attentions "
    "is_encoder_decoder add_cross_attention chunk_size_feed_forward id2label label2id problem_type _name_or_path "
    "pruned_heads tie_encoder_decoder cross_attention_hidden_size is_decoder torchscript use_bfloat16 tf_legacy_loss "
    "finetuning_task task_specific_params tokenizer_class prefix unsloth_version name_or_path "
    "_attn_implementation_autoset pretraining_tp has_embed_tokens has_lm_head runtime_block_size "
    # What a copy of a mixture-of-experts target's configuration leaves behind; the draft's layers are dense.
    "num_experts num_experts_per_tok moe_intermediate_size norm_topk_prob decoder_sparse_step mlp_only_layers "
    "output_router_logits router_aux_loss_coef shared_expert_intermediate_size"
).split()
"""Keys that say nothing about the network."""

_SINKS_OF_KIND = {FULL: "add_full_attention_sink_bias", SLIDING: "add_swa_attention_sink_bias"}
_MAX_WINDOW_LAYERS = 28  # the class's default: layers before this one have full attention

# Positions of text are the same in all sections of a multimodal embedding.
_ROPE_SILENT = {
    "rope_theta",
    "rope_type",
    "type",
    "partial_rotary_factor",
    "rotary_pairs",
    "mrope_section",
    "mrope_interleaved",
}


def shape(content: Content, section: str = "", defaults: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """Sizes of the layers, and whether their attention has biases.

    Args:
        section: where the keys are, with its dot; empty for the top level.
        defaults: of keys that may be absent.
    """
    for key, served in NEUTRAL.items():
        for name in {section + key, key, f"dflash_config.{key}"}:
            content.require(name, served)
    content.skip(*SILENT, *(section + key for key in SILENT))
    table = {field: (section + field,) for field in (*SHAPE, "attention_bias")}
    return content.collect(table, {"attention_bias": False, **(defaults or {})})


def attention(content: Content, num_layers: Any, section: str = "") -> dict[str, Any]:
    """Kind of attention of each layer. What ``layer_types`` says counts, whatever ``use_sliding_window`` says."""
    types = content.find(f"{section}layer_types")
    window = content.find(f"{section}sliding_window")
    sliding = content.find(f"{section}use_sliding_window", default=False)
    first = content.find(f"{section}max_window_layers", default=_MAX_WINDOW_LAYERS)
    content.names |= {"layer_types": f"{section}layer_types", "sliding_window": f"{section}sliding_window"}
    if type(num_layers) is not int:
        return {}
    if content.find("dflash_config.use_swa") is True:
        types, window = [SLIDING] * num_layers, content.find("dflash_config.swa_window_size", "sliding_window")
    elif types is None and sliding is True and type(first) is int:
        types = [SLIDING if layer >= first else FULL for layer in range(num_layers)]
    if types is None or types == [FULL] * num_layers:
        return {}
    if not isinstance(types, list):
        raise content.refuse(f"{section}layer_types", "should be a list of kinds of attention, one for each layer")
    return {"layer_types": tuple(types), "sliding_window": window}


def causal_layers(content: Content, values: Mapping[str, Any]) -> tuple[bool, ...]:
    """Return which layers look ahead in the block: all alike where a key says so, else those without a window."""
    listed = content.find("causal_layers")
    causal = content.find("is_causal", "dflash_config.causal", "dflash_config.is_causal", "dflash_query_causal")
    num_layers, types = values.get("num_hidden_layers"), values.get("layer_types", ())
    if listed is not None:
        layers = tuple(listed) if isinstance(listed, list) else listed
        return () if isinstance(layers, tuple) and not any(layers) else layers
    if causal is not None or type(num_layers) is not int:
        return (True,) * num_layers if causal is True and type(num_layers) is int else ()
    if content.find("dflash_config.use_swa") is True:
        return ()
    return tuple(layer_type == SLIDING for layer_type in types) if SLIDING in types else ()


def extras(content: Content, values: Mapping[str, Any], names: Collection[str], section: str = "") -> dict[str, Any]:
    """Attention sinks of each layer, and what its values are multiplied with.

    Args:
        values: what was read of the layers.
        names: tensors of the network that the files hold; where no key speaks of sinks, they decide.
        section: as for :func:`shape`.
    """
    num_layers = values.get("num_hidden_layers")
    if type(num_layers) is not int:
        return {}
    types = values.get("layer_types") or (FULL,) * num_layers
    listed = content.find("sink_layers")
    of_kind = {kind: _switched_on(content, key, section) for kind, key in _SINKS_OF_KIND.items()}
    of_all = _switched_on(content, "attention_sink_bias", section)
    if isinstance(listed, list):
        layers = tuple(listed)
    elif listed is not None:
        raise content.refuse("sink_layers", "should be a list of true and false, one for each layer")
    elif of_all is None and not any(value is not None for value in of_kind.values()):
        layers = tuple(f"layers.{layer}.self_attn.attention_sink_bias" in names for layer in range(num_layers))
    else:
        layers = tuple(bool(of_all or of_kind.get(str(layer_type))) for layer_type in types)
    found: dict[str, Any] = {"sink_layers": layers if any(layers) else ()}
    scale = content.find(*_places("attention_value_scale", section))
    return found if scale is None else found | {"attention_value_scale": scale}


def _switched_on(content: Content, key: str, section: str) -> bool | None:
    """Return what the file says, if anything."""
    value = content.find(*_places(key, section))
    if value not in (None, True, False):
        raise content.refuse(next(name for name in _places(key, section) if name in content), "should be true or false")
    return None if value is None else bool(value)


def _places(key: str, section: str) -> tuple[str, ...]:
    return tuple(dict.fromkeys((section + key, key, f"dflash_config.{key}")))


def rope(
    content: Content, layer_types: tuple[str, ...], section: str = "", *, kind: str | None = None
) -> dict[str, Any]:
    """The rotary embedding.

    Args:
        layer_types: of the draft's layers; empty stands for full attention.
        kind: whose parameters count where ``rope_parameters`` has a set per kind of attention; None takes those of the
            kinds that occur.
    """
    parameters = _parameters(content, section, {kind} if kind else {FULL, SLIDING} & {*map(str, layer_types)} or {FULL})
    values: dict[str, Any] = {}
    for field in ("rope_theta", "partial_rotary_factor"):
        top = content.find(section + field)
        content.names[field] = section + field
        if None not in (top, parameters.get(field)) and top != parameters[field]:
            raise content.refuse(section + field, f"contradicts {parameters[field]!r} beside the other keys of RoPE")
        if (value := parameters.get(field, top)) is not None:
            values[field] = value
    types = {str(parameters[name]) for name in ("rope_type", "type") if name in parameters} - {"default", "mrope"}
    given = {name: value for name, value in parameters.items() if name not in _ROPE_SILENT}
    if types:
        values["rope_scaling"] = _scaling(content, types, given)
    elif unknown := given.keys() - {"factor"}:
        raise content.refuse(section + "rope_parameters", f"has keys that only a rope_type explains: {sorted(unknown)}")
    return values


def pairs_are_neighbours(content: Content, section: str = "") -> bool:
    """Return whether RoPE turns channels 2i and 2i + 1 of a head, not i and i + hd / 2."""
    keys = [name + key for name in {section, "", "dflash_config."} for key in ("rope_is_neox_style", "is_neox_style")]
    return content.find(*keys) is False


def pairs_span_head(content: Content) -> bool:
    """Return whether a rotation of some pairs alone leaves out the last pairs of the whole head, as it does here.

    Elsewhere (``partial_rotary_factor`` of Hugging Face) it pairs up the first channels and leaves out the others.
    """
    parameters = content.find("rope_parameters", default={})
    return bool(parameters.get("rotary_pairs") == "whole_head")


def _parameters(content: Content, section: str, kinds: set[str]) -> dict[str, Any]:
    """The keys of ``rope_parameters`` (transformers 5) and ``rope_scaling`` (transformers 4) that are set."""
    found: dict[str, Any] = {}
    for key in ("rope_parameters", "rope_scaling"):
        parameters = content.find(section + key)
        if parameters is None:
            continue
        if not isinstance(parameters, Mapping):
            raise content.refuse(section + key, "should be an object or null")
        for name, value in _of_kind(content, section + key, parameters, kinds).items():
            if value is not None and found.setdefault(name, value) != value:
                raise content.refuse(section + key, f"contradicts {name}={found[name]!r} in rope_parameters")
    return found


def _of_kind(content: Content, key: str, parameters: Mapping[str, Any], kinds: set[str]) -> Mapping[str, Any]:
    """The parameters themselves, or those of one kind of attention."""
    nested = {kind: value for kind, value in parameters.items() if isinstance(value, Mapping)}
    if not nested:
        return parameters
    sets = [nested[kind] for kind in kinds if kind in nested]
    if len(sets) < len(kinds) or any(other != sets[0] for other in sets):
        raise content.refuse(
            key,
            f"is not one set for the layers of kind {', '.join(sorted(kinds))}; layers that differ in RoPE are not "
            "supported",
        )
    chosen: Mapping[str, Any] = sets[0]
    return chosen


def _scaling(content: Content, types: set[str], given: dict[str, Any]) -> RopeScaling:
    origin = f"{content.origin}: rope_parameters"
    if len(types) > 1:
        raise CheckpointError(f"{origin} has two types, {sorted(types)}: {REMEDY}")
    if unknown := given.keys() - {field.name for field in fields(RopeScaling) if field.name != "origin"}:
        raise CheckpointError(f"{origin}={given!r} has unknown keys {sorted(unknown)}: {REMEDY}")
    return RopeScaling(rope_type=types.pop(), origin=origin, **given)  # type: ignore[arg-type]  # it checks
