"""Tests of config.json: what is accepted, what is refused, and that refusals name key and value.

Some files are those of published drafters; those that trainers write are in test_draft_weights.py.
"""

import json
from types import SimpleNamespace

import pytest
from switches import SWITCHES

from sglang_dspark.draft.config import check_dimensions
from sglang_dspark.draft.formats import read_config, read_content
from sglang_dspark.draft.formats.checkpoint import describe, switches
from sglang_dspark.errors import CheckpointError


def read(content):
    return read_content(content, origin="some/config.json").config


NO_HEADS = {
    "markov_rank": 0,
    "markov_head_type": ...,
    "enable_confidence_head": False,
    "confidence_head_with_markov": ...,
}
VARIANTS = SWITCHES | {
    "no heads": NO_HEADS,
    "rank 0": NO_HEADS | {"enable_confidence_head": True, "confidence_head_with_markov": False},
    "no confidence": {"enable_confidence_head": False, "confidence_head_with_markov": ...},
    "single tap": {"target_layer_ids": [-1]},
    "inference only": {"num_anchors": ..., "layer_types": ..., "tie_word_embeddings": ...},
    "transformers 4": {"rope_parameters": ..., "rope_theta": 500.0, "rope_scaling": None},
    "theta twice, equal": {"rope_theta": 500.0},
    "depth unknown": {"num_target_layers": None},
    "no vocabulary in common with defaults": {"vocab_size": 151936, "mask_token_id": 151669},
}


@pytest.mark.parametrize("overrides", VARIANTS.values(), ids=VARIANTS.keys())
def test_written_configs_read_back_equal(make_config, overrides):
    config = read(make_config(**overrides))
    again = read(json.loads(json.dumps(config.to_dict())))
    assert again == config
    assert config.rope_theta == 500.0


def test_head_keys_are_written_only_where_deepspec_writes_them(make_config):
    bare = read(make_config(**VARIANTS["no heads"])).to_dict()
    assert "markov_head_type" not in bare and "confidence_head_with_markov" not in bare
    full = read(make_config()).to_dict()
    assert full["markov_head_type"] == "vanilla" and full["confidence_head_with_markov"] is True
    assert full["layer_types"] == ["full_attention"] * 2 and full["tie_word_embeddings"] is False


REQUIRED = [
    "hidden_size intermediate_size num_hidden_layers num_attention_heads num_key_value_heads head_dim vocab_size",
    "rms_norm_eps max_position_embeddings block_size mask_token_id target_layer_ids num_target_layers markov_rank",
    "markov_head_type enable_confidence_head confidence_head_with_markov architectures",
]


@pytest.mark.parametrize("key", " ".join(REQUIRED).split())
def test_a_missing_key_is_named(make_config, key):
    with pytest.raises(CheckpointError, match=f"some/config.json: .*'{key}'"):
        read(make_config(**{key: ...}))


MALFORMED = [
    ("block_size", 0),
    ("block_size", "7"),
    ("hidden_size", 24.0),
    ("head_dim", 7),
    ("num_key_value_heads", 4),
    ("rms_norm_eps", float("nan")),
    ("mask_token_id", -1),
    ("mask_token_id", 19),
    ("target_layer_ids", []),
    ("target_layer_ids", [1, 1]),
    ("target_layer_ids", [2, 1]),
    ("target_layer_ids", [-2, 1]),
    ("target_layer_ids", [1, 3]),
    ("markov_rank", -1),
    ("markov_head_type", "lstm"),
    ("enable_confidence_head", 1),
    ("layer_types", ["full_attention"]),
    ("layer_types", ["full_attention", "linear_attention"]),
    ("causal_layers", [True]),
    ("draft_vocab_size", 20),
    ("hidden_act", "gelu"),
    ("num_anchors", 0),
    ("rope_theta", 10000.0),
    ("rope_parameters", "default"),
]


@pytest.mark.parametrize(("key", "value"), MALFORMED, ids=[f"{key}={value}" for key, value in MALFORMED])
def test_a_malformed_key_is_named_with_its_value(make_config, key, value):
    with pytest.raises(CheckpointError) as error:
        read(make_config(**{key: value}))
    shown = tuple(value) if isinstance(value, list) else value
    assert f"{key}={value!r}" in str(error.value) or f"{key}={shown!r}" in str(error.value)
    assert str(error.value).startswith("some/config.json: ")


def test_all_unfit_keys_are_named_at_once(make_config):
    with pytest.raises(CheckpointError) as error:
        read(make_config(block_size=0, vocab_size=..., rms_norm_eps="small"))
    for problem in ("block_size=0", "'vocab_size'", "rms_norm_eps='small'"):
        assert problem in str(error.value)


@pytest.mark.parametrize(
    ("rope", "message"),
    [
        ({"rope_type": "longrope", "factor": 4.0}, "rope_type='longrope'.*linear, llama3, yarn"),
        ({"rope_type": "yarn"}, "rope_type='yarn'.*'factor'"),
        ({"rope_type": "yarn", "factor": -1.0}, "factor=-1.0"),
        ({"rope_type": "yarn", "factor": 4.0, "stretch": 1}, "'stretch'"),
        ({"rope_type": "llama3", "factor": 8.0}, "'low_freq_factor'"),
        ({"rope_type": "default", "stretch": 1}, "'stretch'"),
        ({"rope_type": "default", "type": "yarn", "factor": 4.0}, "'default', 'yarn'"),
        ({"partial_rotary_factor": 2.0, "rotary_pairs": "whole_head"}, "partial_rotary_factor=2.0.*head_dim=8"),
        ({"partial_rotary_factor": 0.5, "rotary_pairs": "halves"}, "rotary_pairs='halves'"),
        (
            {"rope_type": "proportional", "rotary_pairs": "leading", "partial_rotary_factor": 0.5},
            "rotary_pairs='leading'.*'whole_head'",
        ),
        ({"rope_dim": 12}, "rope_dim=12.*head_dim=8"),
        ({"sliding_attention": {"rope_theta": 1.0}}, "full_attention"),
    ],
)
def test_unfit_rope_is_refused(make_config, rope, message):
    with pytest.raises(CheckpointError, match=message):
        read(make_config(rope_parameters={"rope_theta": 500.0, **rope}))


@pytest.mark.parametrize("architectures", [["Glm5_2DSparkModel"], ["Qwen3ForCausalLM"], [], "Qwen3DSparkModel", None])
def test_other_architectures_are_told_what_is_supported(make_config, architectures):
    with pytest.raises(CheckpointError) as error:
        read(make_config(architectures=architectures))
    assert "architectures" in str(error.value)
    assert "DeepSpec" in str(error.value)


@pytest.mark.parametrize(
    ("content", "message"), [(None, "cannot be read"), ("{", "not valid JSON"), ("[]", "not an object")]
)
def test_an_unreadable_file_is_named(tmp_path, content, message):
    if content is not None:
        (tmp_path / "config.json").write_text(content)
    with pytest.raises(CheckpointError, match=message) as error:
        read_config(tmp_path)
    assert str(tmp_path / "config.json") in str(error.value)


def test_a_target_of_other_dimensions_is_refused(make_config):
    config = read(make_config())
    fitting = {"hidden_size": 24, "vocab_size": 19, "num_hidden_layers": 4}
    check_dimensions(config, SimpleNamespace(**fitting))
    for key, name in (
        ("hidden_size", "hidden_size"),
        ("vocab_size", "vocab_size"),
        ("num_hidden_layers", "num_target"),
    ):
        with pytest.raises(CheckpointError, match=rf"{name}.*the target has {key}=99"):
            check_dimensions(config, SimpleNamespace(**fitting | {key: 99}))


def test_a_drafter_of_unknown_depth_still_needs_its_taps(make_config):
    config = read(make_config(num_target_layers=None))
    target = {"hidden_size": 24, "vocab_size": 19}
    check_dimensions(config, SimpleNamespace(**target, num_hidden_layers=4))
    with pytest.raises(CheckpointError, match=r"layer 2.* 3 layers"):
        check_dimensions(config, SimpleNamespace(**target, num_hidden_layers=3))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"rope_parameters": ...}, "'rope_theta'"),
        ({"markov_rank": 0, "markov_head_type": ...}, "confidence_head_with_markov=True.*markov_rank=0"),
        ({"layer_types": ["full_attention", "sliding_attention"]}, "sliding_window=None"),
        ({"sink_layers": [True]}, "sink_layers=.*num_hidden_layers=2"),
        ({"sink_layers": [1, 0]}, "sink_layers="),
        ({"sink_layers": True}, "sink_layers=True"),
        ({"attention_sink_bias": "yes"}, "attention_sink_bias='yes'"),
        ({"attention_value_scale": 0}, "attention_value_scale=0"),
        ({"attention_value_scale": "2"}, "attention_value_scale='2'"),
    ],
)
def test_keys_that_do_not_fit_together_are_named(make_config, change, message):
    with pytest.raises(CheckpointError, match=message):
        read(make_config(**change))


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
