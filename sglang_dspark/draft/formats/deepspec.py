"""The format of DeepSpec, which is the canonical one: its keys are required, and taps ascend.

NeMo AutoModel writes the same for Qwen3 targets, dense or not, and Ling's class is another name of it. Files that were
rewritten from SpecForge's format keep taps and mask in ``dflash_config``. Keys that DeepSpec lacks, such as
``sample_from_anchor``, are written by :meth:`DraftConfig.to_dict`.
"""

from __future__ import annotations

from sglang_dspark.draft.formats import qwen3
from sglang_dspark.draft.formats.content import Content, Table
from sglang_dspark.draft.formats.reading import Found, Shapes

_SECTIONS = ("", "dflash_config.", "dspark_config.")
_NESTED = (
    "target_layer_ids mask_token_id block_size num_target_layers markov_rank markov_head_type enable_confidence_head "
    "confidence_head_with_markov"
).split()
_TABLE: Table = {field: tuple(section + field for section in _SECTIONS) for field in _NESTED}
_OPTIONAL = ("sample_from_anchor", "draft_vocab_size", "window_from_anchor", "num_anchors")
_SILENT = (
    "target_model_type target_text_model_type dflash_config.projector_type dflash_config.attention_mode "
    "dflash_config.confidence_head_alpha"
).split()


def read(content: Content, shapes: Shapes) -> Found:
    """Everything has to be in the file; tensors decide nothing."""
    values = qwen3.shape(content)
    content.require("tie_word_embeddings", False)
    content.skip(*_SILENT)
    values |= content.collect(_TABLE)
    for key in _OPTIONAL:
        if key in content and (value := content.find(key)) is not None:
            values[key] = value
    if values.get("markov_rank") == 0:
        values["markov_head_type"] = None
    if values.get("enable_confidence_head") is False:
        values["confidence_head_with_markov"] = False
    values |= qwen3.attention(content, values.get("num_hidden_layers"))
    values["causal_layers"] = qwen3.causal_layers(content, values)
    values |= qwen3.extras(content, values, names=())
    values |= qwen3.rope(content, values.get("layer_types", ()))
    return Found(
        values,
        any_tap_order=False,
        neighbours=qwen3.pairs_are_neighbours(content),
        span_head=qwen3.pairs_span_head(content),
    )
