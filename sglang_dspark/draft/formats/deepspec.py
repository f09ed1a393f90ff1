"""The format of DeepSpec, which is the canonical one: its keys are required, and taps ascend.

NeMo AutoModel writes the same for Qwen3 targets, dense or not, and Ling's class is another name of it. Drafters for
Gemma 4 12B have a class of their own, with Gemma's layers. Files that were rewritten from SpecForge's format keep taps
and mask in ``dflash_config``. Keys that DeepSpec lacks, such as ``sample_from_anchor``, are written by
:meth:`DraftConfig.to_dict`.
"""

from sglang_dspark.draft.formats import gemma4, qwen3, rotation
from sglang_dspark.draft.formats.content import Content, Table
from sglang_dspark.draft.formats.reading import Reading, finish, heads, own_embedding
from sglang_dspark.draft.formats.tensors import TensorRules

_SECTIONS = ("", "dflash_config.", "dspark_config.")
_NESTED = (
    "target_layer_ids mask_token_id block_size num_target_layers markov_rank markov_head_type enable_confidence_head "
    "confidence_head_with_markov"
).split()
_TABLE: Table = {field: tuple(section + field for section in _SECTIONS) for field in _NESTED}
_OPTIONAL: Table = {
    field: tuple(section + field for section in _SECTIONS)
    for field in ("sample_from_anchor", "draft_vocab_size", "window_from_anchor", "num_anchors")
}
_SILENT = (
    "target_model_type target_text_model_type dflash_config.projector_type dflash_config.attention_mode "
    "dflash_config.confidence_head_alpha"
).split()


def read(content: Content) -> Reading:
    """Read a file that has to say everything; tensors decide nothing about the heads."""
    rules = TensorRules()
    if gemma4.describes(content):
        gemma4.shape(content)
    else:
        qwen3.shape(content)
    own_embedding(content)
    content.skip(*_SILENT)
    content.collect(_TABLE)
    content.collect(_OPTIONAL, optional=True)
    heads(content, {}, {})
    qwen3.attention(content)
    qwen3.causal_layers(content)
    qwen3.extras(content, {})
    return finish("DeepSpec", content, rules, span_head=rotation.rope(content))
