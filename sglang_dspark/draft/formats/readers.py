"""The reader of each format.

**DeepSpec**, the canonical format: its keys are required, and target layers ascend. NeMo AutoModel writes the same for
Qwen3 targets, dense or not, and Ling's class is another name of it. Drafters for Gemma 4 12B have a class of their own,
with Gemma's layers. Files that were rewritten from SpecForge's format keep target layers and mask in ``dflash_config``.
Keys that DeepSpec lacks, such as ``sample_from_anchor``, are written by :meth:`DraftConfig.to_dict`.

**DFlash** and others that keep a drafter's own keys in ``dflash_config``: SpecForge, ModelOpt, TorchSpec; and GGUF.

**speculators**, vLLM's library, of its kinds dspark, dflash and dflash2.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from sglang_dspark.declared import check
from sglang_dspark.draft.config import ARCHITECTURES, SLIDING, DraftConfig
from sglang_dspark.draft.formats import layers
from sglang_dspark.draft.formats.content import (
    DRAFT_TO_TARGET,
    FLAT_HEADS,
    SECTIONS,
    Content,
    FormatName,
    Remark,
    Shapes,
    Table,
    TensorRules,
    rotary_order,
)
from sglang_dspark.draft.quantised import Storage
from sglang_dspark.draft.rope import rotary_dim
from sglang_dspark.errors import CheckpointError

_TAPS = {"target_layer_ids": 0, "aux_hidden_state_layer_ids": 1, "eagle_aux_hidden_state_layer_ids": 1}
"""Keys that name taps, and the number of the output of the target's first layer in them."""


@dataclass(frozen=True)
class Reading:
    """A checkpoint's configuration, and how its tensors become the network's.

    Attributes:
        format: of the checkpoint.
        config: canonical.
        rules: for the tensors.
        remarks: on keys of config.json that were not taken at their word.
        unread_keys: of config.json, many of them from a copy of the target's.
        storage: how its tensors are quantised; None if they are not.
    """

    format: FormatName
    config: DraftConfig
    rules: TensorRules
    remarks: tuple[Remark, ...]
    unread_keys: tuple[str, ...]
    storage: Storage | None = None


def heads(content: Content, tensors: Shapes, defaults: Mapping[str, Any]) -> None:
    """Fill in what the file does not say about the heads: from its tensors, or from the format's defaults without any.

    Args:
        tensors: shapes by the network's names.
    """
    values = content.values
    stored = {name: shape for name, shape in tensors.items() if shape}
    if stored:
        w1, confidence = stored.get("markov_head.markov_w1.weight"), stored.get("confidence_head.proj.weight")
        defaults = {"markov_rank": 0 if w1 is None else w1[-1], "enable_confidence_head": confidence is not None}
        if confidence is not None and isinstance(hidden_size := values.get("hidden_size"), int):
            defaults["confidence_head_with_markov"] = confidence[-1] > hidden_size
        types = {"gated": "gate_proj", "rnn": "joint_proj", "selector": "hidden_projection"}
        defaults["markov_head_type"] = next(
            (kind for kind, name in types.items() if f"markov_head.{name}.weight" in stored), "vanilla"
        )
    for key in ("markov_rank", "markov_head_type", "enable_confidence_head", "confidence_head_with_markov"):
        if key in defaults:
            values.setdefault(key, defaults[key])
    if values.get("markov_rank") == 0:
        values["markov_head_type"] = None
    if values.get("enable_confidence_head") is False:
        values["confidence_head_with_markov"] = False


def reduced_vocabulary(content: Content, default: int | None = None) -> None:
    """Set ``draft_vocab_size`` from the tensors, or from the format's default without any, if no key says it."""
    values, shapes = content.values, content.shapes
    size = values.get("draft_vocab_size")
    if size is None:
        size = next(iter(shapes.get(DRAFT_TO_TARGET, ())), None if shapes else default)
    values["draft_vocab_size"] = size


def own_embedding(content: Content) -> None:
    """Refuse a drafter whose LM head is its own embedding: an LM head that is absent is the target's."""
    tied = content.find("tie_word_embeddings", default=False)
    names = {name.removeprefix("model.") for name in content.shapes}
    if tied is not False and "embed_tokens.weight" in names and "lm_head.weight" not in names:
        raise content.refuse(
            "tie_word_embeddings", "next to an own embed_tokens.weight is not supported; store lm_head.weight as well"
        )


def finish(name: FormatName, content: Content, rules: TensorRules, *, span_head: bool, first_layer: int = 0) -> Reading:
    """Put the taps in order and check everything.

    Args:
        rules: names of the tensors.
        span_head: see :func:`~.layers.rope`.
        first_layer: number that the format gives to the output of the target's first layer.

    Raises:
        CheckpointError: a key is missing, malformed, contradictory or unsupported.
    """
    values, canonical = content.values, name == "DeepSpec"
    taps = values.get("target_layer_ids")
    if isinstance(taps, tuple) and all(type(tap) is int for tap in taps):
        in_order = tuple(range(len(taps)))
        order = in_order if canonical else tuple(sorted(in_order, key=taps.__getitem__))
        values["target_layer_ids"] = tuple(taps[index] - first_layer for index in order)
        rules = replace(rules, tap_order=() if order == in_order else order)
        _check_columns(content, len(taps))
        _compare_taps(content, taps, first_layer)
    if values.get("draft_vocab_size") == values.get("vocab_size"):
        values["draft_vocab_size"] = None  # the whole vocabulary
    values["origin"] = content.origin
    check(DraftConfig, values, origin=content.origin, names=content.names)
    config = DraftConfig(**values)
    channels = rotary_order(
        config.head_dim,
        rotary_dim(config.head_dim, config.partial_rotary_factor),
        neighbours=layers.pairs_are_neighbours(content),
        span_head=span_head,
    )
    rules = replace(rules, rotary_order=channels, head_dim=config.head_dim)
    return Reading(name, config, rules, tuple(content.remarks), content.unread())


def _compare_taps(content: Content, taps: tuple[int, ...], first_layer: int) -> None:
    """Note keys next to the format's own that name other taps."""
    own = content.names["target_layer_ids"]
    for key, first in _TAPS.items():
        for section in ("", *(f"{section}." for section in SECTIONS)):
            listed = content.find(section + key)
            if section + key == own or listed is None:
                continue
            if listed != [tap - first_layer + first for tap in taps]:
                words = (
                    f"is ignored, though it names other layers than {own}={list(taps)}: the output of the first layer "
                    f"has the number {first} here, and {first_layer} there. Ask who trained the drafter"
                )
                content.remark(section + key, listed, words, doubtful=True)


def _check_columns(content: Content, num_taps: int) -> None:
    """Refuse a drafter that reads a layer which its list of taps does not name; its projection's shape tells."""
    hidden_size, shapes = content.values.get("hidden_size"), content.shapes.items()
    columns = next((shape[1] for name, shape in shapes if name.endswith("fc.weight") and len(shape) == 2), None)
    if type(hidden_size) is int and columns == (num_taps + 1) * hidden_size:
        key = content.names.get("target_layer_ids", "target_layer_ids")
        raise CheckpointError(
            f"{content.origin}: fc.weight reads {num_taps + 1} layers of the target, but {key} names {num_taps}: the "
            "target's last layer is implied, which cannot be tapped. Use another drafter of this target"
        )


def layout_question(content: Content) -> CheckpointError:
    """Return the error of a file that does not say which slots predict."""
    return CheckpointError(
        f"{content.origin}: does the slot of the anchor predict? The file does not say (no key sample_from_anchor), "
        "and both answers are in use. Ask who trained the drafter, and add the answer to the file"
    )


_DEEPSPEC_SECTIONS = ("", "dflash_config.", "dspark_config.")
_NESTED = (
    "target_layer_ids mask_token_id block_size num_target_layers markov_rank markov_head_type enable_confidence_head "
    "confidence_head_with_markov"
).split()
_DEEPSPEC_TABLE: Table = {field: tuple(section + field for section in _DEEPSPEC_SECTIONS) for field in _NESTED}
_DEEPSPEC_OPTIONAL: Table = {
    field: tuple(section + field for section in _DEEPSPEC_SECTIONS)
    for field in ("sample_from_anchor", "draft_vocab_size", "window_from_anchor", "num_anchors")
}
_DEEPSPEC_SILENT = (
    "target_model_type target_text_model_type dflash_config.projector_type dflash_config.attention_mode "
    "dflash_config.confidence_head_alpha"
).split()


def read_deepspec(content: Content) -> Reading:
    """Read a file that has to say everything; tensors decide nothing about the heads."""
    rules = TensorRules()
    if ARCHITECTURES["gemma4"] in (content.find("architectures") or ()):
        layers.gemma4_shape(content)
    else:
        layers.qwen3_shape(content)
    own_embedding(content)
    content.skip(*_DEEPSPEC_SILENT)
    content.collect(_DEEPSPEC_TABLE)
    content.collect(_DEEPSPEC_OPTIONAL, optional=True)
    heads(content, {}, {})
    layers.attention(content)
    layers.causal_layers(content)
    layers.extras(content, {})
    return finish("DeepSpec", content, rules, span_head=layers.rope(content))


_SECTIONS = ("dflash_config.", "dspark_config.", "")


def _anywhere(*names: str) -> tuple[str, ...]:
    return tuple(section + name for name in names for section in _SECTIONS)


_DFLASH_TABLE: Table = {
    "block_size": _anywhere("block_size"),
    "mask_token_id": _anywhere("mask_token_id", "dspark_noise_token_id", "pard_token", "ptd_token_id"),
    "target_layer_ids": _anywhere("target_layer_ids"),
}
_DFLASH_OPTIONAL: Table = {
    "markov_rank": _anywhere("markov_rank", "dspark_markov_rank", "selector_rank"),
    "markov_head_type": _anywhere("markov_head_type", "dspark_markov_head_type"),
    "enable_confidence_head": _anywhere("enable_confidence_head", "use_confidence_head"),
    "confidence_head_with_markov": _anywhere("confidence_head_with_markov"),
    "draft_vocab_size": _anywhere("draft_vocab_size"),
    "num_target_layers": _anywhere("num_target_layers"),
}
_DFLASH_SILENT = ("format", *_anywhere("projector_type", "num_anchors", "num_layers"))
_ATTENTION_MODES = ("gqa", "mha")


@dataclass(frozen=True)
class Variant:
    """The conventions that one of these formats assumes.

    Attributes:
        sample_from_anchor: layout of the slots if no key gives it; None if both are in use.
        defaults: of the heads, if neither a key nor the tensors decide.
        renamed: tensors.
    """

    sample_from_anchor: bool | None
    defaults: Mapping[str, Any]
    renamed: Mapping[str, str] = field(default_factory=dict)


_NO_HEADS = {"markov_rank": 0, "enable_confidence_head": False}
VARIANTS: Mapping[FormatName, Variant] = {
    "SpecForge": Variant(True, {**_NO_HEADS, "markov_head_type": "vanilla", "confidence_head_with_markov": False}),
    "ModelOpt": Variant(True, {"markov_head_type": "vanilla", "confidence_head_with_markov": True}, FLAT_HEADS),
    "TorchSpec": Variant(None, {"markov_head_type": "vanilla"}),
    "DFlash": Variant(False, _NO_HEADS),
    "llama.cpp": Variant(None, _NO_HEADS),
}


def read_dflash(name: FormatName, content: Content) -> Reading:
    """Read one of :data:`VARIANTS`."""
    variant = VARIANTS[name]
    rules = TensorRules(renamed=variant.renamed)
    tensors = rules.shapes(content.shapes)
    layers.qwen3_shape(content)
    own_embedding(content)
    content.skip(*_DFLASH_SILENT)
    content.collect(_DFLASH_TABLE)
    content.collect(_DFLASH_OPTIONAL, optional=True)
    if content.find(*_anywhere("selector_rank")):
        content.values.setdefault("markov_head_type", "selector")
    alpha = content.find(*_anywhere("confidence_head_alpha"))
    if isinstance(alpha, int | float):
        content.values.setdefault("enable_confidence_head", alpha > 0)
    heads(content, tensors, variant.defaults)
    reduced_vocabulary(content)
    content.values["num_target_layers"] = _depth(content.values)
    keys = (*_anywhere("sample_from_anchor"), "dflash_config.shift_label", "shift_label")
    content.names["sample_from_anchor"] = next((key for key in keys if key in content), keys[0])
    content.values["sample_from_anchor"] = content.find(*keys, default=variant.sample_from_anchor)
    if content.values["sample_from_anchor"] is None:
        raise layout_question(content)
    _check_attention_mode(content)
    layers.attention(content)
    layers.causal_layers(content)
    layers.extras(content, tensors)
    if name == "llama.cpp" and (window := content.values.get("sliding_window")):
        words = "is read as a window that slides along with the slots, in causal layers: the file does not say its rule"
        content.remark("sliding_window", window, words, doubtful=True)
    return finish(name, content, rules, span_head=layers.rope(content))


def _depth(values: Mapping[str, Any]) -> Any:
    """Return the depth of the target. Some trainers write the number of taps there, which then is too small."""
    depth, taps = values.get("num_target_layers"), values.get("target_layer_ids")
    if type(depth) is int and isinstance(taps, tuple) and all(type(tap) is int for tap in taps):
        return None if depth <= max(taps, default=-1) else depth
    return depth


def _check_attention_mode(content: Content) -> None:
    for key in ("dflash_config.attention_mode", "dflash_config.attention_modes"):
        modes = content.find(key)
        if any(mode not in _ATTENTION_MODES for mode in (modes if isinstance(modes, list) else [modes]) if mode):
            raise content.refuse(
                key, f"is not supported; only {' and '.join(_ATTENTION_MODES)} are. Use another drafter of this target"
            )


_LAYERS = "transformer_layer_config."
_SPECULATORS_TABLE: Table = {field: (field,) for field in ("block_size", "mask_token_id")} | {
    "target_layer_ids": ("aux_hidden_state_layer_ids",)
}
_SPECULATORS_OPTIONAL: Table = {
    field: (field,)
    for field in "markov_head_type enable_confidence_head confidence_head_with_markov draft_vocab_size".split()
} | {"markov_rank": ("markov_rank", "selector_rank")}
_DEFAULTS: Mapping[str, Mapping[str, Any]] = {
    "dspark": {
        "markov_rank": 256,
        "markov_head_type": "vanilla",
        "enable_confidence_head": True,
        "confidence_head_with_markov": True,
    },
    "dflash": {"markov_rank": 0, "enable_confidence_head": False},
    "dflash2": {"markov_rank": 256, "markov_head_type": "selector", "enable_confidence_head": False},
}
_EXTRAS_OF_DFLASH2 = {"conv_kernel_size": 2, "conv_group_size": 16, "selector_top_k": 16}
_DRAFT_VOCAB_SIZE = 32000

_ROPE_THETA = 10_000.0

_SPECULATORS_SILENT = (
    "speculators_model_type speculators_version max_anchors tie_word_embeddings "
    "has_no_defaults_at_init speculators_config.algorithm speculators_config.default_proposal_method "
    "speculators_config.verifier speculators_config.proposal_methods transformer_layer_config.tie_word_embeddings"
).split()


def read_speculators(content: Content) -> Reading:
    """Read a file whose absent keys mean the defaults of the library, unless the tensors say otherwise."""
    kind, values = content.find("speculators_model_type"), content.values
    content.section = _LAYERS
    rules = TensorRules()
    tensors = rules.shapes(content.shapes)
    own_embedding(content)
    content.skip(*_SPECULATORS_SILENT)
    layers.qwen3_shape(content, _class_defaults(content))
    content.collect(_SPECULATORS_TABLE)
    content.collect(_SPECULATORS_OPTIONAL, optional=True)
    heads(content, tensors, _DEFAULTS[kind])
    reduced_vocabulary(content, _DRAFT_VOCAB_SIZE)
    values["num_target_layers"] = None
    values["sample_from_anchor"] = _speculators_sample_from_anchor(content, kind)
    layers.attention(content)
    window_looks_ahead = content.find("sliding_window_non_causal", default=kind == "dflash2")
    content.names["causal_layers"] = "sliding_window_non_causal"
    if SLIDING in (types := values.get("layer_types", ())):
        values["window_from_anchor"] = True
        values["causal_layers"] = () if window_looks_ahead else tuple(layer == SLIDING for layer in types)
    if kind == "dflash2":
        values |= _EXTRAS_OF_DFLASH2
    layers.extras(content, tensors)
    values["rope_theta"] = _ROPE_THETA
    parameters = content.find(f"{_LAYERS}rope_parameters", default={})
    # All layers use the set of the target's sliding attention, if there is one.
    kind_of_set = SLIDING if isinstance(parameters, Mapping) and SLIDING in parameters else None
    span_head = layers.rope(content, kind_of_set)
    return finish("speculators", content, rules, span_head=span_head, first_layer=1)


def _class_defaults(content: Content) -> dict[str, Any]:
    """Return the sizes of the layers' class in transformers: only what differs from its defaults is stored."""
    from transformers import CONFIG_MAPPING

    name = content.find(f"{_LAYERS}model_type", default="qwen3")
    if name not in ("qwen3", "llama"):
        return {}
    sizes = CONFIG_MAPPING[name]()
    defaults = {key: getattr(sizes, key) for key in layers.SHAPE}
    if name == "llama":
        heads, width = (
            content.find(_LAYERS + key, default=defaults[key]) for key in ("num_attention_heads", "hidden_size")
        )
        defaults["num_key_value_heads"] = heads
        if type(heads) is int and type(width) is int and heads > 0:
            defaults["head_dim"] = width // heads
    return defaults


def _speculators_sample_from_anchor(content: Content, kind: str) -> Any:
    """Return the key, or else what the number of drafts says; the library's default for a missing key has changed."""
    given = content.find("sample_from_anchor")
    if given is not None:
        return given
    methods = content.find("speculators_config.proposal_methods", default=[])
    block_size = content.values.get("block_size")
    first = methods[0] if isinstance(methods, list) and methods else None
    drafts = first.get("speculative_tokens") if isinstance(first, Mapping) else None
    if type(block_size) is not int or drafts == block_size - 1 or (drafts is None and kind in ("dflash", "dflash2")):
        return False
    if drafts == block_size and kind == "dspark":
        return True
    raise layout_question(content)
