"""config.json: what is accepted, what is refused, and that refusals say which key, which value and what to do."""

import json
import subprocess
import sys

import pytest

from sglang_dspark.draft.config import DraftConfig
from sglang_dspark.errors import CheckpointError


def read(content):
    return DraftConfig.from_dict(content, origin="some/config.json")


def test_the_golden_checkpoint_is_read(golden_dir):
    config = DraftConfig.from_pretrained(golden_dir / "vanilla_g7")
    assert (config.block_size, config.target_layer_ids, config.num_target_layers) == (7, (0, 2, 4), 6)
    assert (config.hidden_size, config.intermediate_size, config.num_hidden_layers) == (128, 256, 2)
    assert (config.num_attention_heads, config.num_key_value_heads, config.head_dim) == (4, 2, 32)
    assert (config.vocab_size, config.mask_token_id, config.max_position_embeddings) == (256, 2, 1024)
    assert (config.rms_norm_eps, config.rope_theta) == (1e-6, 10000.0)
    assert (config.markov_rank, config.markov_head_type) == (32, "vanilla")
    assert (config.enable_confidence_head, config.confidence_head_with_markov) == (True, True)
    assert (config.num_taps, config.confidence_input_size, config.num_anchors) == (3, 160, 32)


VARIANTS = {
    "gated": {"markov_head_type": "gated"},
    "rank 0": {"markov_rank": 0, "markov_head_type": ..., "confidence_head_with_markov": False},
    "no heads": {
        "markov_rank": 0,
        "markov_head_type": ...,
        "enable_confidence_head": False,
        "confidence_head_with_markov": ...,
    },
    "no confidence": {"enable_confidence_head": False, "confidence_head_with_markov": ...},
    "single tap": {"target_layer_ids": [-1]},
    "inference only": {"num_anchors": ..., "layer_types": ..., "tie_word_embeddings": ...},
    "transformers 4": {"rope_parameters": ..., "rope_theta": 500.0, "rope_scaling": None},
    "theta twice, equal": {"rope_theta": 500.0},
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


def test_a_missing_rope_base_is_named(make_config):
    with pytest.raises(CheckpointError, match="'rope_theta' is missing"):
        read(make_config(rope_parameters=...))


MALFORMED = [
    ("block_size", 0),
    ("block_size", "7"),
    ("block_size", True),
    ("hidden_size", 24.0),
    ("head_dim", 7),
    ("num_hidden_layers", -1),
    ("num_key_value_heads", 4),
    ("rms_norm_eps", 0),
    ("rms_norm_eps", float("nan")),
    ("mask_token_id", -1),
    ("mask_token_id", 19),
    ("target_layer_ids", []),
    ("target_layer_ids", "1"),
    ("target_layer_ids", [1, 1]),
    ("target_layer_ids", [2, 1]),
    ("target_layer_ids", [-2, 1]),
    ("target_layer_ids", [1, 3]),
    ("target_layer_ids", [0.0, 1.0]),
    ("markov_rank", -1),
    ("markov_rank", None),
    ("markov_head_type", "lstm"),
    ("markov_head_type", ["vanilla"]),
    ("enable_confidence_head", 1),
    ("confidence_head_with_markov", "true"),
    ("attention_bias", True),
    ("hidden_act", "gelu"),
    ("tie_word_embeddings", True),
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


def test_rank_zero_contradicts_a_confidence_head_with_markov_features(make_config):
    with pytest.raises(
        CheckpointError, match="confidence_head_with_markov=True needs a Markov head, but markov_rank=0"
    ):
        read(make_config(markov_rank=0, markov_head_type=...))


def test_layer_types_must_be_full_attention_once_per_layer(make_config):
    for layer_types in (["full_attention"], ["full_attention", "sliding_attention"]):
        with pytest.raises(CheckpointError, match=r"layer_types=.*num_hidden_layers=2"):
            read(make_config(layer_types=layer_types))


@pytest.mark.parametrize(
    "overrides",
    [
        {"rope_parameters": {"rope_theta": 500.0, "rope_type": "yarn", "factor": 4.0}},
        {"rope_parameters": {"rope_theta": 500.0, "rope_type": "default", "partial_rotary_factor": 0.25}},
        {"rope_parameters": ..., "rope_theta": 500.0, "rope_scaling": {"type": "linear", "factor": 2.0}},
    ],
)
def test_scaled_rope_is_refused(make_config, overrides):
    with pytest.raises(CheckpointError, match=r"rope_\w+=\{.*is not supported; only the default rotary embedding"):
        read(make_config(**overrides))


@pytest.mark.parametrize("architectures", [["Gemma4DSparkModel"], ["Qwen3ForCausalLM"], [], "Qwen3DSparkModel", None])
def test_other_architectures_are_told_what_is_supported(make_config, architectures):
    with pytest.raises(CheckpointError) as error:
        read(make_config(architectures=architectures))
    assert f"architectures={architectures!r} is not supported" in str(error.value)
    assert "architectures=['Qwen3DSparkModel']" in str(error.value)


def test_speculators_checkpoints_are_recognised(make_config):
    with pytest.raises(CheckpointError, match=r"speculators_model_type='dspark'.*supported: DeepSpec"):
        read(make_config(architectures=["DSparkSpeculator"], speculators_model_type="dspark"))


@pytest.mark.parametrize(
    ("content", "message"), [(None, "cannot be read"), ("{", "not valid JSON"), ("[]", "not an object")]
)
def test_an_unreadable_file_is_named(tmp_path, content, message):
    if content is not None:
        (tmp_path / "config.json").write_text(content)
    with pytest.raises(CheckpointError, match=message) as error:
        DraftConfig.from_pretrained(tmp_path)
    assert str(tmp_path / "config.json") in str(error.value)


def test_a_target_of_other_dimensions_is_refused(make_config):
    config = read(make_config())
    fitting = {"hidden_size": 24, "vocab_size": 19, "num_hidden_layers": 4}
    config.check_target(**fitting)
    for key, name in (
        ("hidden_size", "hidden_size"),
        ("vocab_size", "vocab_size"),
        ("num_hidden_layers", "num_target"),
    ):
        with pytest.raises(CheckpointError, match=rf"{name}.*the target has {key}=99"):
            config.check_target(**fitting | {key: 99})


def test_reading_a_config_needs_no_torch_and_the_model_no_engine():
    code = (
        "import sys, sglang_dspark.draft.config; assert 'torch' not in sys.modules\n"
        "import sglang_dspark.draft.weights, sglang_dspark.draft.reference, sglang_dspark.tools.golden\n"
        "assert not {'sglang', 'transformers'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
