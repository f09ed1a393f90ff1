"""config.json: what is accepted, what is refused, and that refusals say which key, which value and what to do."""

import json
from types import SimpleNamespace

import pytest
from switches import SWITCHES

from sglang_dspark.draft.config import check_dimensions
from sglang_dspark.draft.formats import read_config, read_content
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
    with pytest.raises(CheckpointError, match=rf"some/config.json: key '{key}' is missing"):
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
    for problem in ("block_size=0: Expected `int` >= 1", "key 'vocab_size' is missing", "rms_norm_eps='small'"):
        assert problem in str(error.value)


@pytest.mark.parametrize(
    ("rope", "message"),
    [
        ({"rope_type": "longrope", "factor": 4.0}, "rope_type='longrope': Expected one of linear, llama3, yarn"),
        ({"rope_type": "yarn"}, "rope_type='yarn' needs the key 'factor'"),
        ({"rope_type": "yarn", "factor": -1.0}, "factor=-1.0: Expected `float` > 0.0"),
        ({"rope_type": "yarn", "factor": 4.0, "stretch": 1}, r"unknown keys \['stretch'\]"),
        ({"rope_type": "llama3", "factor": 8.0}, "needs the key 'low_freq_factor'"),
        ({"rope_type": "default", "stretch": 1}, r"unknown keys \['stretch'\]"),
        ({"rope_type": "default", "type": "yarn", "factor": 4.0}, r"has two types, \['default', 'yarn'\]"),
        (
            {"partial_rotary_factor": 2.0, "rotary_pairs": "whole_head"},
            "partial_rotary_factor=2.0 rotates 16 of head_dim=8",
        ),
        ({"partial_rotary_factor": 0.5, "rotary_pairs": "halves"}, "rotary_pairs='halves' should be"),
        (
            {"rope_type": "proportional", "rotary_pairs": "leading", "partial_rotary_factor": 0.5},
            "rotary_pairs='leading' should be 'whole_head'",
        ),
        ({"rope_dim": 12}, "rope_dim=12 should be at most head_dim=8"),
        ({"sliding_attention": {"rope_theta": 1.0}}, "is not one set for the layers of kind full_attention"),
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
    assert "formats that load are DeepSpec" in str(error.value)


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
    with pytest.raises(CheckpointError, match=r"reads the output of layer 2.* of a target with 3 layers"):
        check_dimensions(config, SimpleNamespace(**target, num_hidden_layers=3))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"rope_parameters": ...}, "'rope_theta' is missing"),
        (
            {"markov_rank": 0, "markov_head_type": ...},
            "confidence_head_with_markov=True needs a Markov head, but markov_rank=0",
        ),
        (
            {"layer_types": ["full_attention", "sliding_attention"]},
            "sliding_window=None must give the width of the sliding_attention layers",
        ),
        ({"sink_layers": [True]}, "sink_layers=.* must have one entry per layer, num_hidden_layers=2"),
        ({"sink_layers": [1, 0]}, "sink_layers=.*: Expected `bool`, got `int`"),
        ({"sink_layers": True}, "sink_layers=True should be a list of true and false, one for each layer"),
        ({"attention_sink_bias": "yes"}, "attention_sink_bias='yes' should be true or false"),
        ({"attention_value_scale": 0}, "attention_value_scale=0: Expected `float` > 0.0"),
        ({"attention_value_scale": "2"}, "attention_value_scale='2': Expected `float`, got `str`"),
    ],
)
def test_keys_that_do_not_fit_together_are_named(make_config, change, message):
    with pytest.raises(CheckpointError, match=message):
        read(make_config(**change))
