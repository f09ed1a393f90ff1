"""Keys of the Qwen3 layers that every format describes, most of them under the same names."""

from collections.abc import Collection, Mapping
from typing import Any

from sglang_dspark.draft.config import FULL, SLIDING
from sglang_dspark.draft.formats.content import Content
from sglang_dspark.draft.quantised import recognition

SHAPE = (
    "hidden_size intermediate_size num_hidden_layers num_attention_heads num_key_value_heads head_dim vocab_size "
    "rms_norm_eps max_position_embeddings"
).split()

NEUTRAL: Mapping[str, Any] = {
    "hidden_act": "silu",
    "attn_logit_softcapping": None,
    "input_embedding_scale": 1,
    "mask_embedding": None,
    "use_gemma_norm": False,
    "use_aux_hidden_state": True,
}
"""Keys that change the network, and the one value that leaves it as it is here."""

SILENT = (
    "architectures auto_map model_type dtype torch_dtype transformers_version attention_dropout initializer_range "
    "use_cache bos_token_id eos_token_id pad_token_id return_dict output_hidden_states output_attentions "
    "is_encoder_decoder add_cross_attention chunk_size_feed_forward id2label label2id problem_type _name_or_path "
    "pruned_heads tie_encoder_decoder cross_attention_hidden_size is_decoder torchscript use_bfloat16 tf_legacy_loss "
    "finetuning_task task_specific_params tokenizer_class prefix unsloth_version name_or_path "
    "_attn_implementation_autoset pretraining_tp has_embed_tokens has_lm_head runtime_block_size "
    "resid_pdrop embd_pdrop cache_implementation"
).split()
"""Keys that say nothing about the network."""

_SINKS_OF_KIND = {FULL: "add_full_attention_sink_bias", SLIDING: "add_swa_attention_sink_bias"}
_EXTRAS = (
    *("attention_value_scale", "final_logit_softcapping", "output_multiplier"),
    *("conv_kernel_size", "conv_group_size", "selector_top_k"),
)
_MAX_WINDOW_LAYERS = 28  # the class's default: layers before this one have full attention


def shape(
    content: Content,
    defaults: Mapping[str, Any] | None = None,
    *,
    neutral: Mapping[str, Any] = NEUTRAL,
    keys: Mapping[str, str] | None = None,
) -> None:
    """Read the sizes of the layers, and whether their attention has biases.

    Args:
        defaults: of keys that may be absent.
        neutral: as :data:`NEUTRAL`, of layers of another kind.
        keys: of fields that such layers have under another name.
    """
    section, keys = content.section, keys or {}
    for key, served in neutral.items():
        for name in _spellings(content, key):
            content.require(name, served)
    for key in recognition.KEYS:
        for name in _spellings(content, key):
            content.ignore(name, "it is the target's; the drafter's tensors are not quantised")
    content.skip(*SILENT, *(section + key for key in SILENT))
    table = {field: (section + keys.get(field, field),) for field in (*SHAPE, "attention_bias")}
    content.collect(table, {"attention_bias": False, **(defaults or {})})
    hidden_size = content.values.get("hidden_size")
    for name in _spellings(content, "target_hidden_size"):
        if content.find(name) not in (None, hidden_size):
            words = f"differs from the drafter's hidden_size={hidden_size}, which is not supported"
            raise content.refuse(name, f"{words}. Use another drafter of this target")
    biases = any(name.endswith("_proj.bias") and ".self_attn." in name for name in content.shapes)
    if content.shapes and not biases and content.values["attention_bias"] is True:
        content.remark(section + "attention_bias", True, "is ignored: the drafter's attention is stored without biases")
        content.values["attention_bias"] = False


def attention(content: Content) -> None:
    """Read the attention of each layer. ``layer_types`` decides, whatever ``use_sliding_window`` says.

    Engines look for these keys among those of the layers and at the top level.
    """
    num_layers, listed = content.values.get("num_hidden_layers"), _listed_types(content)
    window, sliding = (content.find(*_beside(content, key)) for key in ("sliding_window", "use_sliding_window"))
    first = content.find(*_beside(content, "max_window_layers"), default=_MAX_WINDOW_LAYERS)
    everywhere = content.find("dflash_config.use_swa") is True
    content.names |= {key: _written(content, key) for key in ("layer_types", "sliding_window")}
    if type(num_layers) is not int:
        return
    types = listed
    if everywhere and not _names_windows(listed):
        types = [SLIDING] * num_layers
    elif types is None and sliding is True and window is not None and type(first) is int:
        types = [SLIDING if layer >= first else FULL for layer in range(num_layers)]
    if types is None or types == [FULL] * num_layers:
        for name in (*_beside(content, "sliding_window"), *_beside(content, "use_sliding_window")):
            content.ignore(name, "no layer of the drafter slides")
        content.ignore("dflash_config.swa_window_size", "dflash_config.use_swa is not set")
        return
    if not isinstance(types, list):
        raise content.refuse(content.names["layer_types"], "should be a list of kinds of attention, one for each layer")
    window = content.find("dflash_config.swa_window_size", *_beside(content, "sliding_window"))
    content.values |= {"layer_types": tuple(types), "sliding_window": window}
    if sliding is False and types is listed:
        words = "contradicts the sliding layers of layer_types, which are used: ask the authors of the drafter"
        content.remark(_written(content, "use_sliding_window"), sliding, words, doubtful=True)
    if everywhere and FULL in types:
        words = "contradicts the full attention in layer_types, which is used: ask the authors of the drafter"
        content.remark("dflash_config.use_swa", everywhere, words, doubtful=True)


def _listed_types(content: Content) -> Any:
    return content.find(*_beside(content, "layer_types"))


def _names_windows(types: Any) -> bool:
    return isinstance(types, list) and SLIDING in types


def causal_layers(content: Content) -> None:
    """Read which layers are causal in the block: all alike if a key says so, otherwise those with a window.

    A window that ``use_swa`` gives to all layers says nothing about causality.
    """
    listed = content.find("causal_layers")
    section = (f"dflash_config.{key}" for key in ("causal", "is_causal", "causal_head"))  # the last is JetSpec's
    causal = content.find("is_causal", *section, "dflash_query_causal")
    num_layers, types = content.values.get("num_hidden_layers"), content.values.get("layer_types", ())
    layers: Any = ()
    if listed is not None:
        layers = tuple(listed) if isinstance(listed, list) else listed
    elif type(num_layers) is int and causal is not None:
        layers = (causal is True,) * num_layers
    elif type(num_layers) is int and (
        content.find("dflash_config.use_swa") is not True or _names_windows(_listed_types(content))
    ):
        layers = tuple(layer_type == SLIDING for layer_type in types)
    content.values["causal_layers"] = () if isinstance(layers, tuple) and not any(layers) else layers


def extras(content: Content, tensors: Collection[str]) -> None:
    """Read the attention sinks of each layer, the factor of its values, its convolutions, and what becomes of logits.

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
    for key in _EXTRAS:
        content.names[key] = next((name for name in _spellings(content, key) if name in content), key)
        if (value := content.find(*_spellings(content, key))) is not None:
            content.values[key] = value
    if content.values.get("final_logit_softcapping") == 0:
        del content.values["final_logit_softcapping"]  # no bound, as DFlash 2 writes it


def _switched_on(content: Content, key: str) -> bool | None:
    """Return the switch as the file has it, if it has one."""
    names = _spellings(content, key)
    value = content.find(*names)
    if value not in (None, True, False):
        raise content.refuse(next(name for name in names if name in content), "should be true or false")
    if value and content.shapes and not any(name.endswith(".attention_sink_bias") for name in content.shapes):
        content.remark(key, value, "is ignored: the drafter's attention is stored without sinks")
        return None
    return None if value is None else bool(value)


def _beside(content: Content, key: str) -> tuple[str, ...]:
    """Return the key among those of the layers and at the top level, which may be the same."""
    return tuple(dict.fromkeys((content.section + key, key)))


def _written(content: Content, key: str) -> str:
    """Return the one of these places that has a value, or else the first."""
    names = _beside(content, key)
    return next((name for name in names if content.find(name) is not None), names[0])


def _spellings(content: Content, key: str) -> tuple[str, ...]:
    return (*_beside(content, key), f"dflash_config.{key}", f"eagle_config.{key}")
