"""Keys of the layers, Qwen3's and Gemma 4's, and of their rotary embedding, which every format describes.

DeepSpec copies the text configuration of Gemma 4 12B, and builds every layer of the drafter as the target's layers with
full attention are built.

Keys of the rotary embedding lie at the top, in ``rope_parameters`` (transformers 5), in ``rope_scaling`` (4).
"""

from collections.abc import Collection, Mapping
from typing import Any

from sglang_dspark.declared import REMEDY
from sglang_dspark.draft import quantised
from sglang_dspark.draft.config import FULL, SLIDING
from sglang_dspark.draft.formats.content import Content
from sglang_dspark.draft.rope import ALL_KEYS, RopeScaling, keys_of
from sglang_dspark.errors import CheckpointError

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


def qwen3_shape(
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
    for key in quantised.KEYS:
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
    window, sliding = (content.find(*_places(content, key)) for key in ("sliding_window", "use_sliding_window"))
    first = content.find(*_places(content, "max_window_layers"), default=_MAX_WINDOW_LAYERS)
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
        for name in (*_places(content, "sliding_window"), *_places(content, "use_sliding_window")):
            content.ignore(name, "no layer of the drafter has a sliding window")
        content.ignore("dflash_config.swa_window_size", "dflash_config.use_swa is not set")
        return
    if not isinstance(types, list):
        raise content.refuse(content.names["layer_types"], "should be a list of kinds of attention, one for each layer")
    window = content.find("dflash_config.swa_window_size", *_places(content, "sliding_window"))
    content.values |= {"layer_types": tuple(types), "sliding_window": window}
    if sliding is False and types is listed:
        words = "contradicts the sliding layers of layer_types, which are used: ask the authors of the drafter"
        content.remark(_written(content, "use_sliding_window"), sliding, words, doubtful=True)
    if everywhere and FULL in types:
        words = "contradicts the full attention in layer_types, which is used: ask the authors of the drafter"
        content.remark("dflash_config.use_swa", everywhere, words, doubtful=True)


def _listed_types(content: Content) -> Any:
    return content.find(*_places(content, "layer_types"))


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


def _places(content: Content, key: str) -> tuple[str, ...]:
    """Return the key among those of the layers and at the top level, which may be the same."""
    return tuple(dict.fromkeys((content.section + key, key)))


def _written(content: Content, key: str) -> str:
    """Return the one of these places that has a value, or else the first."""
    names = _places(content, key)
    return next((name for name in names if content.find(name) is not None), names[0])


def _spellings(content: Content, key: str) -> tuple[str, ...]:
    return (*_places(content, key), f"dflash_config.{key}", f"eagle_config.{key}")


_NEUTRAL: Mapping[str, Any] = {
    **{key: served for key, served in NEUTRAL.items() if key != "hidden_act"},
    "hidden_activation": "gelu_pytorch_tanh",
    "hidden_size_per_layer_input": 0,
    "enable_moe_block": False,
    "use_double_wide_mlp": False,
    "num_kv_shared_layers": 0,
}
_SHARED = "attention_k_eq_v"
_OF_FULL_ATTENTION = {"head_dim": "global_head_dim", "num_key_value_heads": "num_global_key_value_heads"}


def gemma4_shape(content: Content) -> None:
    """Read the sizes of the layers; their K/V heads are those of full attention if values are the keys."""
    shared = content.find(_SHARED, default=False)
    keys = {**_OF_FULL_ATTENTION, _SHARED: _SHARED}
    if shared is not True:
        content.skip(keys.pop("num_key_value_heads"))
    content.skip(*_OF_FULL_ATTENTION)
    qwen3_shape(content, neutral=_NEUTRAL, keys=keys)
    content.values |= {"backbone": "gemma4", _SHARED: shared}


WHOLE_HEAD, LEADING = "whole_head", "leading"
"""Values of ``rotary_pairs``: if a part of the pairs rotates, channel i is paired with i + head_dim / 2, as it is done
here, or the first channels are paired up among each other, as Hugging Face's ``partial_rotary_factor`` has it."""

PART_OF_HEAD = ("partial_rotary_factor", "rotary_dim", "rotary_pct")
"""Keys next to the layers or among those of RoPE, also in files that say nothing about parts of a head otherwise.

Trainers rotate whole heads; a part that is meant has ``rotary_pairs`` next to it."""
LEFT_OVER = (
    "mrope_section mrope_interleaved llama_4_scaling_beta apply_yarn_scaling finetuned long_factor short_factor "
    "long_mscale short_mscale"
).split()
"""Keys among those of RoPE that drafters have from a copy of their target's configuration, and no trainer reads."""
_REASON = "it is a copy of the target's, and no trainer reads it"
_READ = ("rope_theta", "rope_type", "type", "rotary_pairs", "rope_dim", *PART_OF_HEAD)


def rope(content: Content, kind: str | None = None) -> bool:
    """Read the rotary embedding.

    Args:
        kind: of attention, whose set counts if ``rope_parameters`` has one per kind; None takes the kinds that occur.

    Returns:
        Whether a part of the pairs leaves out the last ones of the whole head, see :data:`WHOLE_HEAD`.
    """
    keys = _RopeKeys(content, kind)
    theta = keys.agreed("rope_theta")
    if theta is not None:
        content.values["rope_theta"] = theta
    types = {str(keys.inner[key]) for key in ("rope_type", "type") if key in keys.inner}
    if len(types) > 1:
        raise CheckpointError(f"{content.origin}: rope_parameters has two types, {sorted(types)}: {REMEDY}")
    rope_type = next(iter(types), "default")
    if rope_type == "dynamic":
        place, rope_type = keys.places.get("rope_type") or keys.places["type"], "default"
        content.remark(place, "dynamic", "is read as plain RoPE, which it is up to max_position_embeddings")
    given = _of_type(content, keys, rope_type, said=bool(types))
    if rope_type != "default":
        origin = f"{content.origin}: rope_parameters"
        scaling = RopeScaling(rope_type=rope_type, origin=origin, **given)  # type: ignore[arg-type]  # it checks
        content.values["rope_scaling"] = scaling
    return _read_part(content, keys, spans_head=rope_type == "proportional")


def pairs_are_neighbours(content: Content) -> bool:
    """Return whether RoPE turns channels 2i and 2i + 1 of a head, not i and i + hd / 2."""
    sections = dict.fromkeys((content.section, "", "dflash_config."))
    names = [section + key for key in ("rope_is_neox_style", "is_neox_style") for section in sections]
    return content.find(*names) is False


class _RopeKeys:
    """The keys of RoPE that are set, wherever they are.

    Attributes:
        inner: those of ``rope_parameters`` and ``rope_scaling``.
        places: of those, the key with the objects that lead to it.
    """

    def __init__(self, content: Content, kind: str | None) -> None:
        self.content, self.inner, self.places = content, dict[str, Any](), dict[str, str]()
        occurring = {FULL, SLIDING} & {*map(str, content.values.get("layer_types", ()))} or {FULL}
        for key in (content.section + "rope_parameters", content.section + "rope_scaling"):
            parameters = content.find(key)
            if parameters is None:
                continue
            if not isinstance(parameters, Mapping):
                raise content.refuse(key, "should be an object or null")
            for place, name, value in _of_kind(content, key, parameters, {kind} if kind else occurring):
                if self.inner.setdefault(name, value) != value and name not in (*PART_OF_HEAD, *LEFT_OVER):
                    raise content.refuse(key, f"contradicts {name}={self.inner[name]!r} in rope_parameters")
                self.places.setdefault(name, place)

    def everywhere(self, name: str) -> dict[str, Any]:
        """Return the values of one key by its places, inner ones first."""
        top = self.content.section + name
        found = {self.places[name]: self.inner[name]} if name in self.inner else {}
        return found if (value := self.content.find(top)) is None else found | {top: value}

    def agreed(self, name: str) -> Any:
        """Return the value of one key; None if it is not set.

        Raises:
            CheckpointError: two places contradict each other.
        """
        found = self.everywhere(name)
        top = self.content.names[name] = self.content.section + name
        value = next(iter(found.values()), None)
        if found.get(top, value) != value:
            raise self.content.refuse(top, f"contradicts {value!r} next to the other keys of RoPE")
        return value


def _of_kind(content: Content, key: str, parameters: Mapping[str, Any], kinds: set[str]) -> list[tuple[str, str, Any]]:
    """Return place, name and value of the parameters themselves, or of those of one kind of attention."""
    nested = {kind: value for kind, value in parameters.items() if isinstance(value, Mapping)}
    chosen, place = parameters, key
    if nested:
        sets = [nested[kind] for kind in sorted(kinds) if kind in nested]
        if len(sets) < len(kinds) or any(other != sets[0] for other in sets):
            raise content.refuse(
                key,
                f"is not one set for the layers of kind {', '.join(sorted(kinds))}; layers that differ in RoPE are not "
                "supported",
            )
        chosen, place = sets[0], f"{key}.{min(kinds)}"
        for kind in sorted(nested.keys() - kinds):
            if nested[kind] != chosen:
                content.remark(f"{key}.{kind}", nested[kind], f"is ignored: the drafter's layers have that of {place}")
    # Text has equal positions in all sections of mrope.
    return [
        (f"{place}.{name}", name, "default" if value == "mrope" else value)
        for name, value in chosen.items()
        if value is not None
    ]


def _of_type(content: Content, keys: _RopeKeys, rope_type: str, *, said: bool) -> dict[str, Any]:
    """Return the keys that the type reads, and note the others.

    Args:
        said: there is a key that names the type.
    """
    used, unknown = keys_of(rope_type), []
    for name, value in keys.inner.items():
        if name in used or name in _READ:
            continue
        if name in ALL_KEYS and said:
            content.remark(keys.places[name], value, f"is ignored: rope_type={rope_type!r} does not read it")
        elif name in ALL_KEYS:
            words = "is ignored, which may be wrong: no rope_type says what it is for. Ask who trained the drafter"
            content.remark(keys.places[name], value, words, doubtful=True)
        elif name in LEFT_OVER and value:
            content.remark(keys.places[name], value, f"is ignored: {_REASON}")
        elif name not in LEFT_OVER:
            unknown.append(name)
    if unknown:
        raise CheckpointError(
            f"{content.origin}: rope_parameters={keys.inner!r} has unknown keys {sorted(unknown)}: {REMEDY}"
        )
    given = {name: keys.inner[name] for name in used if name in keys.inner}
    original = "original_max_position_embeddings"  # some targets have it next to the layers
    if original in used:
        given |= {} if (length := keys.agreed(original)) is None else {original: length}
    else:
        content.ignore(content.section + original, f"rope_type={rope_type!r} does not read it")
    return given


def _read_part(content: Content, keys: _RopeKeys, *, spans_head: bool) -> bool:
    """Read which part of a head rotates: the whole one, unless the file says that a part is meant.

    Args:
        spans_head: the type of RoPE itself pairs the halves of the head, and means a part.
    """
    pairs, channels = keys.agreed("rotary_pairs"), keys.inner.get("rope_dim")
    share, head_dim = "partial_rotary_factor", content.values.get("head_dim")
    served = (WHOLE_HEAD,) if spans_head else (WHOLE_HEAD, LEADING)
    if pairs not in (None, *served):
        raise CheckpointError(
            f"{content.origin}: rotary_pairs={pairs!r} should be {' or '.join(map(repr, served))}: {REMEDY}"
        )
    if spans_head:
        pairs = WHOLE_HEAD
    if channels is not None:  # SGLang's key for what was trained
        if type(channels) is not int or type(head_dim) is not int or not 0 < channels <= head_dim:
            raise CheckpointError(
                f"{content.origin}: rope_dim={channels!r} should be at most head_dim={head_dim}: {REMEDY}"
            )
        content.values[share] = channels / head_dim
    elif pairs is not None:
        if (value := keys.agreed(share)) is not None:
            content.values[share] = value
        return bool(pairs == WHOLE_HEAD)
    for key in PART_OF_HEAD:
        for place, value in keys.everywhere(key).items():
            if value not in (1, head_dim):
                content.remark(place, value, f"is ignored: {_REASON}")
    return False
