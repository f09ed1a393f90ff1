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


def shape(content: Content, defaults: Mapping[str, Any] | None = None) -> None:
    """Read the sizes of the layers, and whether their attention has biases.

    Args:
        defaults: of keys that may be absent.
    """
    section = content.section
    for key, served in NEUTRAL.items():
        for name in _spellings(content, key):
            content.require(name, served)
    content.skip(*SILENT, *(section + key for key in SILENT))
    table = {field: (section + field,) for field in (*SHAPE, "attention_bias")}
    content.collect(table, {"attention_bias": False, **(defaults or {})})


def attention(content: Content) -> None:
    """Read the attention of each layer. ``layer_types`` decides, whatever ``use_sliding_window`` says."""
    section, num_layers = content.section, content.values.get("num_hidden_layers")
    types = content.find(f"{section}layer_types")
    window = content.find(f"{section}sliding_window")
    sliding = content.find(f"{section}use_sliding_window", default=False)
    first = content.find(f"{section}max_window_layers", default=_MAX_WINDOW_LAYERS)
    content.names |= {"layer_types": f"{section}layer_types", "sliding_window": f"{section}sliding_window"}
    if type(num_layers) is not int:
        return
    if content.find("dflash_config.use_swa") is True:
        types, window = [SLIDING] * num_layers, content.find("dflash_config.swa_window_size", "sliding_window")
    elif types is None and sliding is True and type(first) is int:
        types = [SLIDING if layer >= first else FULL for layer in range(num_layers)]
    if types is None or types == [FULL] * num_layers:
        return
    if not isinstance(types, list):
        raise content.refuse(f"{section}layer_types", "should be a list of kinds of attention, one for each layer")
    content.values |= {"layer_types": tuple(types), "sliding_window": window}


def causal_layers(content: Content) -> None:
    """Read which layers are causal in the block: all alike if a key says so, otherwise those with a window."""
    listed = content.find("causal_layers")
    causal = content.find("is_causal", "dflash_config.causal", "dflash_config.is_causal", "dflash_query_causal")
    num_layers, types = content.values.get("num_hidden_layers"), content.values.get("layer_types", ())
    layers: Any = ()
    if listed is not None:
        layers = tuple(listed) if isinstance(listed, list) else listed
    elif type(num_layers) is int and causal is not None:
        layers = (causal is True,) * num_layers
    elif type(num_layers) is int and content.find("dflash_config.use_swa") is not True:
        layers = tuple(layer_type == SLIDING for layer_type in types)
    content.values["causal_layers"] = () if isinstance(layers, tuple) and not any(layers) else layers


def extras(content: Content, tensors: Collection[str]) -> None:
    """Read the attention sinks of each layer, and the factor of its values.

    Args:
        tensors: names of the network's tensors in the files; they decide if no key speaks of sinks.
    """
    num_layers = content.values.get("num_hidden_layers")
    if type(num_layers) is not int:
        return
    types = content.values.get("layer_types") or (FULL,) * num_layers
    listed = content.find("sink_layers")
    of_kind = {kind: _switched_on(content, key) for kind, key in _SINKS_OF_KIND.items()}
    of_all = _switched_on(content, "attention_sink_bias")
    if isinstance(listed, list):
        layers = tuple(listed)
    elif listed is not None:
        raise content.refuse("sink_layers", "should be a list of true and false, one for each layer")
    elif of_all is None and not any(value is not None for value in of_kind.values()):
        layers = tuple(f"layers.{layer}.self_attn.attention_sink_bias" in tensors for layer in range(num_layers))
    else:
        layers = tuple(bool(of_all or of_kind.get(str(layer_type))) for layer_type in types)
    content.values["sink_layers"] = layers if any(layers) else ()
    if (scale := content.find(*_spellings(content, "attention_value_scale"))) is not None:
        content.values["attention_value_scale"] = scale


def _switched_on(content: Content, key: str) -> bool | None:
    """Return what the file says, if anything."""
    names = _spellings(content, key)
    value = content.find(*names)
    if value not in (None, True, False):
        raise content.refuse(next(name for name in names if name in content), "should be true or false")
    return None if value is None else bool(value)


def _spellings(content: Content, key: str) -> tuple[str, ...]:
    return tuple(dict.fromkeys((content.section + key, key, f"dflash_config.{key}")))


def rope(content: Content, *, kind: str | None = None) -> None:
    """Read the rotary embedding.

    Args:
        kind: of attention, whose set counts if ``rope_parameters`` has one per kind; None takes the kinds that occur.
    """
    section, values = content.section, content.values
    occurring = {FULL, SLIDING} & {*map(str, values.get("layer_types", ()))} or {FULL}
    parameters = _parameters(content, {kind} if kind else occurring)
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


def pairs_are_neighbours(content: Content) -> bool:
    """Return whether RoPE turns channels 2i and 2i + 1 of a head, not i and i + hd / 2."""
    keys = ("rope_is_neox_style", "is_neox_style")
    return content.find(*(name for key in keys for name in _spellings(content, key))) is False


def pairs_span_head(content: Content) -> bool:
    """Return whether a rotation of some pairs alone leaves out the last pairs of the whole head, as it does here.

    Elsewhere (``partial_rotary_factor`` of Hugging Face) it pairs up the first channels and leaves out the others.
    """
    parameters = content.find("rope_parameters", default={})
    return bool(parameters.get("rotary_pairs") == "whole_head")


def _parameters(content: Content, kinds: set[str]) -> dict[str, Any]:
    """Return the keys of ``rope_parameters`` (transformers 5) and ``rope_scaling`` (transformers 4) that are set."""
    found: dict[str, Any] = {}
    for key in (content.section + "rope_parameters", content.section + "rope_scaling"):
        parameters = content.find(key)
        if parameters is None:
            continue
        if not isinstance(parameters, Mapping):
            raise content.refuse(key, "should be an object or null")
        for name, value in _of_kind(content, key, parameters, kinds).items():
            if value is not None and found.setdefault(name, value) != value:
                raise content.refuse(key, f"contradicts {name}={found[name]!r} in rope_parameters")
    return found


def _of_kind(content: Content, key: str, parameters: Mapping[str, Any], kinds: set[str]) -> Mapping[str, Any]:
    """Return the parameters themselves, or those of one kind of attention."""
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
