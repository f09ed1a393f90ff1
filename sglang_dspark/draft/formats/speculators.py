"""The format of vLLM's speculators library, of its kinds dspark, dflash and dflash2."""

from collections.abc import Mapping
from typing import Any

from sglang_dspark.draft.config import SLIDING
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
from sglang_dspark.draft.formats.tensors import TensorRules

_LAYERS = "transformer_layer_config."
_TABLE: Table = {field: (field,) for field in ("block_size", "mask_token_id")} | {
    "target_layer_ids": ("aux_hidden_state_layer_ids",)
}
_OPTIONAL: Table = {
    field: (field,)
    for field in (
        "markov_head_type",
        "enable_confidence_head",
        "confidence_head_with_markov",
        "draft_vocab_size",
    )
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

_SILENT = (
    "speculators_model_type speculators_version max_anchors tie_word_embeddings "
    "has_no_defaults_at_init speculators_config.algorithm speculators_config.default_proposal_method "
    "speculators_config.verifier speculators_config.proposal_methods transformer_layer_config.tie_word_embeddings"
).split()


def read(content: Content) -> Reading:
    """Read a file whose absent keys mean the defaults of the library, unless the tensors say otherwise."""
    kind, values = content.find("speculators_model_type"), content.values
    content.section = _LAYERS
    rules = TensorRules()
    tensors = rules.shapes(content.shapes)
    own_embedding(content)
    content.skip(*_SILENT)
    qwen3.shape(content, _class_defaults(content))
    content.collect(_TABLE)
    content.collect(_OPTIONAL, optional=True)
    heads(content, tensors, _DEFAULTS[kind])
    reduced_vocabulary(content, _DRAFT_VOCAB_SIZE)
    values["num_target_layers"] = None
    values["sample_from_anchor"] = _sample_from_anchor(content, kind)
    qwen3.attention(content)
    window_looks_ahead = content.find("sliding_window_non_causal", default=kind == "dflash2")
    content.names["causal_layers"] = "sliding_window_non_causal"
    if SLIDING in (types := values.get("layer_types", ())):
        values["window_from_anchor"] = True
        values["causal_layers"] = () if window_looks_ahead else tuple(layer == SLIDING for layer in types)
    if kind == "dflash2":
        values |= _EXTRAS_OF_DFLASH2
    qwen3.extras(content, tensors)
    values["rope_theta"] = _ROPE_THETA
    span_head = rotation.rope(content, _rope_kind(content))
    return finish("speculators", content, rules, span_head=span_head, first_layer=1)


def _class_defaults(content: Content) -> dict[str, Any]:
    """Return the sizes of the layers' class in transformers: what differs from its defaults is stored alone."""
    from transformers import CONFIG_MAPPING

    name = content.find(f"{_LAYERS}model_type", default="qwen3")
    if name not in ("qwen3", "llama"):
        return {}
    layers = CONFIG_MAPPING[name]()
    defaults = {key: getattr(layers, key) for key in qwen3.SHAPE}
    if name == "llama":
        heads, width = (
            content.find(_LAYERS + key, default=defaults[key]) for key in ("num_attention_heads", "hidden_size")
        )
        defaults["num_key_value_heads"] = heads
        if type(heads) is int and type(width) is int and heads > 0:
            defaults["head_dim"] = width // heads
    return defaults


def _sample_from_anchor(content: Content, kind: str) -> Any:
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


def _rope_kind(content: Content) -> str | None:
    """Return the kind of attention whose set all layers use: the target's for sliding attention if there is one."""
    parameters = content.find(f"{_LAYERS}rope_parameters", default={})
    return SLIDING if isinstance(parameters, Mapping) and SLIDING in parameters else None
