"""Configuration files as published drafters have them. Those that trainers write: test_trainer_files.py."""

import json

import pytest

from sglang_dspark.draft.formats import read_content
from sglang_dspark.draft.formats.checkpoint import describe, switches

QWEN3_8B = json.loads("""\
{"attention_bias": false, "attention_dropout": 0.0, "bos_token_id": 151643, "dtype": "bfloat16",
"eos_token_id": 151645, "head_dim": 128, "hidden_act": "silu", "hidden_size": 4096, "initializer_range": 0.02,
"intermediate_size": 12288, "layer_types": ["full_attention", "full_attention", "full_attention", "full_attention",
"full_attention"], "max_position_embeddings": 40960, "max_window_layers": 5, "model_type": "qwen3",
"num_attention_heads": 32, "num_hidden_layers": 5, "num_key_value_heads": 8, "num_target_layers": 36,
"rms_norm_eps": 1e-06, "rope_scaling": null, "rope_theta": 1000000, "sliding_window": null,
"tie_word_embeddings": false, "use_cache": true, "use_sliding_window": false, "vocab_size": 151936}
""")
TAPS = {"mask_token_id": 151669, "target_layer_ids": [1, 9, 17, 25, 33]}
DFLASH = {"architectures": ["DFlashDraftModel"], "auto_map": {"AutoModel": "dflash.DFlashDraftModel"}}
HEADS = {
    "markov_rank": 256,
    "markov_head_type": "vanilla",
    "enable_confidence_head": True,
    "confidence_head_with_markov": True,
}
LLAMA3_ROPE = json.loads("""\
{"factor": 32.0, "high_freq_factor": 4.0, "low_freq_factor": 1.0, "original_max_position_embeddings": 8192,
"rope_theta": 500000.0, "rope_type": "llama3"}
""")


SPECULATORS = """\
{"architectures": ["DSparkSpeculator"], "model_type": "speculator_model", "speculators_version": "0.8.0",
"block_size": 8, "mask_token_id": 151669, "aux_hidden_state_layer_ids": [2, 10, 18, 26, 34],
"draft_vocab_size": 151936, "target_hidden_size": null, "tie_word_embeddings": false, "max_anchors": 1024,
"speculators_config": {"default_proposal_method": "greedy",
"verifier": {"architectures": ["Qwen3ForCausalLM"], "name_or_path": "Qwen/Qwen3-8B"}},
"transformer_layer_config": {"model_type": "qwen3", "hidden_size": 4096, "intermediate_size": 12288,
"num_hidden_layers": 5, "num_key_value_heads": 8, "max_position_embeddings": 40960,
"rope_parameters": {"rope_theta": 1000000, "rope_type": "default"}}}
"""


def speculators(kind="dspark", tokens=8, **changes):
    content = json.loads(SPECULATORS)
    method = {"proposal_type": "greedy", "speculative_tokens": tokens, "verifier_accept_k": 1}
    content["speculators_config"] |= {"algorithm": kind, "proposal_methods": [method]}
    return content | {"speculators_model_type": kind} | changes


FULL_HEADS = "vanilla Markov head of rank 256, confidence head with Markov features"
BARE = "no Markov head, no confidence head"
OURS = "5 layers, taps [1, 9, 17, 25, 33] of 36"
THEIRS = "5 layers, taps [1, 9, 17, 25, 33]"
WINDOWED = {
    "num_hidden_layers": 3,
    "layer_types": ["sliding_attention"] * 3,
    "sliding_window": 2048,
    "rope_parameters": LLAMA3_ROPE,
}
READ = {
    "DeepSpec's own": (
        QWEN3_8B | {"architectures": ["Qwen3DSparkModel"], "block_size": 7, "num_anchors": 512} | TAPS | HEADS,
        "DeepSpec",
        f"7 drafts per block, {OURS}, {FULL_HEADS}",
    ),
    "DFlash": (
        QWEN3_8B | DFLASH | {"block_size": 16, "dflash_config": TAPS},
        "DFlash",
        f"15 drafts per block, {OURS}, {BARE}, 16 slots of which the anchor's does not predict",
    ),
    "Nemotron 3.5": (
        QWEN3_8B
        | DFLASH
        | {"pard_token": 990, "dspark_markov_rank": 256, "enable_confidence_head": True, "block_size": 8}
        | {"attention_sink_bias": True, "sample_from_anchor": False, "has_embed_tokens": True, "has_lm_head": False}
        | {"target_layer_ids": [1, 9, 17], "eagle_aux_hidden_state_layer_ids": [2, 10, 18]}
        | {"sliding_window": 512, "layer_types": ["sliding_attention"] * 5, "dflash_query_causal": False}
        | {"confidence_head_with_markov": True},
        "TorchSpec",
        (
            f"7 drafts per block, 5 layers, taps [1, 9, 17] of 36, {FULL_HEADS}, 8 slots of which the anchor's does "
            "not predict, window of 512 rows that slides along with the slots in all layers, attention sinks in all "
            "layers"
        ),
    ),
    "speculators, older": (
        speculators(tokens=7),
        "speculators",
        f"7 drafts per block, {THEIRS}, {FULL_HEADS}, 8 slots of which the anchor's does not predict",
    ),
    "speculators for Llama 3.2": (
        speculators(
            transformer_layer_config={
                "model_type": "qwen3",
                "hidden_size": 2048,
                "intermediate_size": 8192,
                "num_key_value_heads": 8,
                "head_dim": 64,
                "vocab_size": 128256,
                **WINDOWED,
            },
            draft_vocab_size=32000,
            aux_hidden_state_layer_ids=[2, 8, 14],
            mask_token_id=128255,
            sample_from_anchor=True,
        ),
        "speculators",
        (
            f"8 drafts per block, 3 layers, taps [1, 7, 13], {FULL_HEADS}, window of 2048 rows before the anchor in "
            "all layers, causal block in all layers, heads for 32000 of 128256 tokens, RoPE of type llama3, factor 32"
        ),
    ),
}


@pytest.mark.parametrize(("content", "name", "words"), READ.values(), ids=READ.keys())
def test_published_files_are_read(content, name, words):
    reading = read_content(content, origin="config.json")
    assert (reading.format, describe(reading.config)) == (name, words)
    assert reading.unread_keys == ()
    # What these two contradict stands in the same files.
    keys = {remark.sentence.split("=")[0].split(".")[-1] for remark in reading.remarks}
    assert keys <= {"use_sliding_window"}


def test_switches_are_named():
    content = speculators(sample_from_anchor=False, draft_vocab_size=32000, attention_sink_bias=True)
    content |= {"attention_value_scale": 0.6, "sliding_window_non_causal": True}
    content["transformer_layer_config"] |= WINDOWED | {"attention_bias": True}
    config = read_content(content, origin="config.json").config
    assert switches(config) == [
        "8 slots of which the anchor's does not predict",
        "window of 2048 rows before the anchor in all layers",
        "heads for 32000 of 151936 tokens",
        "RoPE of type llama3, factor 32",
        "biases in the attention",
        "attention sinks in all layers",
        "values times 0.6",
    ]
    content |= {"sliding_window_non_causal": False}
    assert "causal block in all layers" in switches(read_content(content, origin="").config)
