"""Formats that keep a drafter's own keys in ``dflash_config``: SpecForge, ModelOpt, TorchSpec, DFlash; and GGUF."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from sglang_dspark.draft.formats import qwen3, rotation
from sglang_dspark.draft.formats.content import Content, Table
from sglang_dspark.draft.formats.reading import (
    Reading,
    finish,
    heads,
    layout_question,
    own_embedding,
    reduced_vocabulary,
)
from sglang_dspark.draft.formats.recognition import FormatName
from sglang_dspark.draft.formats.tensors import FLAT_HEADS, TensorRules

_SECTIONS = ("dflash_config.", "dspark_config.", "")


def _anywhere(*names: str) -> tuple[str, ...]:
    return tuple(section + name for name in names for section in _SECTIONS)


_TABLE: Table = {
    "block_size": _anywhere("block_size"),
    "mask_token_id": _anywhere("mask_token_id", "dspark_noise_token_id", "pard_token", "ptd_token_id"),
    "target_layer_ids": _anywhere("target_layer_ids"),
}
_OPTIONAL: Table = {
    "markov_rank": _anywhere("markov_rank", "dspark_markov_rank", "selector_rank"),
    "markov_head_type": _anywhere("markov_head_type", "dspark_markov_head_type"),
    "enable_confidence_head": _anywhere("enable_confidence_head", "use_confidence_head"),
    "confidence_head_with_markov": _anywhere("confidence_head_with_markov"),
    "draft_vocab_size": _anywhere("draft_vocab_size"),
    "num_target_layers": _anywhere("num_target_layers"),
}
_SILENT = ("format", *_anywhere("projector_type", "num_anchors", "num_layers"))
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


def read(name: FormatName, content: Content) -> Reading:
    """Read one of :data:`VARIANTS`."""
    variant = VARIANTS[name]
    rules = TensorRules(renamed=variant.renamed)
    tensors = rules.shapes(content.shapes)
    qwen3.shape(content)
    own_embedding(content)
    content.skip(*_SILENT)
    content.collect(_TABLE)
    content.collect(_OPTIONAL, optional=True)
    if content.find(*_anywhere("selector_rank")):
        content.values.setdefault("markov_head_type", "selector")
    alpha = content.find(*_anywhere("confidence_head_alpha"))
    if isinstance(alpha, int | float):
        content.values.setdefault("enable_confidence_head", alpha > 0)
    heads(content, tensors, variant.defaults)
    reduced_vocabulary(content)
    content.values["num_target_layers"] = _depth(content.values)
    content.values["sample_from_anchor"] = _sample_from_anchor(content, variant)
    _check_attention_mode(content)
    qwen3.attention(content)
    qwen3.causal_layers(content)
    qwen3.extras(content, tensors)
    if name == "llama.cpp" and (window := content.values.get("sliding_window")):
        words = "is read as a window that slides along with the slots, in causal layers: the file does not say its rule"
        content.remark("sliding_window", window, words, doubtful=True)
    return finish(name, content, rules, span_head=rotation.rope(content))


def _depth(values: Mapping[str, Any]) -> Any:
    """Return the depth of the target. Some trainers write the number of taps there, which then is too small."""
    depth, taps = values.get("num_target_layers"), values.get("target_layer_ids")
    if type(depth) is int and isinstance(taps, tuple) and all(type(tap) is int for tap in taps):
        return None if depth <= max(taps, default=-1) else depth
    return depth


def _sample_from_anchor(content: Content, variant: Variant) -> Any:
    keys = (*_anywhere("sample_from_anchor"), "dflash_config.shift_label", "shift_label")
    content.names["sample_from_anchor"] = next((key for key in keys if key in content), keys[0])
    given = content.find(*keys, default=variant.sample_from_anchor)
    if given is None:
        raise layout_question(content)
    return given


def _check_attention_mode(content: Content) -> None:
    for key in ("dflash_config.attention_mode", "dflash_config.attention_modes"):
        modes = content.find(key)
        if any(mode not in _ATTENTION_MODES for mode in (modes if isinstance(modes, list) else [modes]) if mode):
            raise content.refuse(
                key, f"is not supported; only {' and '.join(_ATTENTION_MODES)} are. Use another drafter of this target"
            )
