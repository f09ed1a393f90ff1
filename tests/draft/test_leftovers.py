"""Keys that trainers copy from the target: a drafter is read as it was trained, and what was made of a key is said."""

import json
import logging
import shutil

import format_exports as exports
import pytest
from format_exports import DFLASH, WINDOW, content_of
from golden_replay import replay

from sglang_dspark.draft.formats import read, read_content
from sglang_dspark.draft.formats.layers import LEFT_OVER, PART_OF_HEAD
from sglang_dspark.errors import CheckpointError

FORMATS = {
    "DeepSpec": content_of(exports.deepspec),
    "SpecForge": content_of(exports.specforge),
    "ModelOpt": content_of(exports.modelopt),
    "speculators": content_of(exports.speculators),
    "TorchSpec": content_of(exports.torchspec),
    "DFlash": content_of(exports.dflash, **DFLASH),
}
EVERY_FORMAT = pytest.mark.parametrize("name", FORMATS)


def reading_of(name, *changes):
    """Read a drafter of this format after changes of its config.json, with the shapes of its tensors."""
    content, tensors = FORMATS[name]
    content = json.loads(json.dumps(content))
    for change in changes:
        change(content)
    return read_content(content, origin="config.json", shapes={key: list(t.shape) for key, t in tensors.items()})


def layers(content):
    """Return the keys of the layers, which are in a section of their own in speculators' files."""
    return content.get("transformer_layer_config", content)


def rope(content):
    """Return the set of keys of RoPE that the layers use."""
    parameters = layers(content).setdefault("rope_parameters", {})
    return parameters.get("sliding_attention", parameters)


UNCHANGED = {name: reading_of(name) for name in FORMATS}
SAID_ANYWAY = {name: {remark.sentence for remark in reading.remarks} for name, reading in UNCHANGED.items()}


def said(reading, *, doubtful):
    """Return what the reading of a changed file says and that of an unchanged one does not."""
    remarks = [remark for remark in reading.remarks if remark.sentence not in SAID_ANYWAY[reading.format]]
    return [remark.sentence for remark in remarks if remark.doubtful is doubtful]


def assert_left_over(name, sentence, *changes):
    """The keys change nothing but for one sentence."""
    plain, changed = UNCHANGED[name], reading_of(name, *changes)
    assert (changed.config, changed.rules, changed.unread_keys) == (plain.config, plain.rules, ())
    assert any(sentence in remark.sentence for remark in changed.remarks), changed.remarks


def assert_left_over_silently(name, *changes):
    plain, changed = UNCHANGED[name], reading_of(name, *changes)
    assert (changed.config, changed.remarks, changed.unread_keys) == (plain.config, plain.remarks, ())


@EVERY_FORMAT
def test_keys_that_are_not_read_are_named(name):
    for place in (layers, lambda c: c):
        changed = reading_of(name, lambda c, place=place: place(c).update({"num_experts": 5, "other": None}))
        assert changed.config == UNCHANGED[name].config and changed.remarks == UNCHANGED[name].remarks
        assert [key.rpartition(".")[2] for key in changed.unread_keys] == ["num_experts"]


def in_rope_scaling(content):
    if not isinstance(layers(content).get("rope_scaling"), dict):
        layers(content)["rope_scaling"] = {"rope_type": "default"}
    return layers(content)["rope_scaling"]


@EVERY_FORMAT
@pytest.mark.parametrize("place", [layers, rope, in_rope_scaling])
@pytest.mark.parametrize("key", PART_OF_HEAD)
def test_whole_heads_rotate_whatever_a_copied_key_says(name, place, key):
    assert_left_over(name, f"{key}=0.25 is ignored", lambda c: place(c).update({key: 0.25}))
    reading = reading_of(name, lambda c: place(c).update({key: 0.25}))
    assert (len(said(reading, doubtful=False)), said(reading, doubtful=True)) == (1, [])
    assert said(reading_of(name, lambda c: place(c).update({key: 1.0})), doubtful=False) == []


def top(content):
    return content


SLIDES = {"use_sliding_window": True, "layer_types": ["full_attention"] * 2, "max_window_layers": 0}
IGNORED = [
    *((f"{key}=[2, 1, 1] is ignored: ", rope, {key: [2, 1, 1]}) for key in LEFT_OVER),
    ("='dynamic' is read as plain RoPE", rope, {"rope_type": "dynamic", "factor": 6.0}),
    ("factor=4 is ignored", rope, {"rope_type": "default", "factor": 4}),
    ("original_max_position_embeddings=64 is ignored", layers, {"original_max_position_embeddings": 64}),
    ("sliding_window=4 is ignored: ", layers, {"sliding_window": 4}),
    ("use_sliding_window=True is ignored: no layer of the drafter slides", layers, SLIDES),
    ("attention_bias=True is ignored: ", layers, {"attention_bias": True}),
    ("attention_sink_bias=True is ignored: ", top, {"attention_sink_bias": True}),
    ("add_full_attention_sink_bias=True is ignored: ", top, {"add_full_attention_sink_bias": True}),
    ("quantization_config={'quant_method': 'fp8'} is ignored: ", top, {"quantization_config": {"quant_method": "fp8"}}),
]


@EVERY_FORMAT
@pytest.mark.parametrize(("sentence", "place", "keys"), IGNORED, ids=[sentence for sentence, *_ in IGNORED])
def test_keys_that_say_nothing_of_the_drafter_are_named(name, sentence, place, keys):
    """Tensors show biases, sinks and quantisation, and layers whether they slide."""
    assert_left_over(name, sentence, lambda c: place(c).update(keys))


@EVERY_FORMAT
def test_a_part_that_is_meant_is_read(name):
    part = {"partial_rotary_factor": 0.5, "rotary_pairs": "leading"}
    for meant in (part, part | {"rotary_pairs": "whole_head"}, {"rope_dim": 4, "partial_rotary_factor": 0.25}):
        assert reading_of(name, lambda c, meant=meant: rope(c).update(meant)).config.partial_rotary_factor == 0.5


@EVERY_FORMAT
def test_keys_that_the_type_of_rope_does_not_read_are_named(name):
    changed = reading_of(name, lambda c: rope(c).update(rope_type="linear", factor=2.0, beta_fast=32))
    assert changed.config.rope_scaling.to_dict() == {"rope_type": "linear", "factor": 2.0}
    assert any("beta_fast=32 is ignored: rope_type='linear'" in sentence for sentence in said(changed, doubtful=False))


@EVERY_FORMAT
def test_a_stretch_without_a_type_is_doubtful(name):
    reading = reading_of(name, lambda c: rope(c).pop("rope_type", None), lambda c: rope(c).update(factor=4))
    assert "factor=4 is ignored, which may be wrong: no rope_type" in said(reading, doubtful=True)[0]


YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128}


def test_an_original_length_beside_the_layers_counts_where_rope_reads_it():
    beside = {"rope_type": "yarn", "factor": 4.0}
    reading = reading_of(
        "SpecForge", lambda c: rope(c).update(beside), lambda c: c.update(original_max_position_embeddings=128)
    )
    assert reading.config.rope_scaling == reading_of("SpecForge", lambda c: rope(c).update(YARN)).config.rope_scaling
    with pytest.raises(CheckpointError, match="original_max_position_embeddings=64 contradicts 128"):
        reading_of("SpecForge", lambda c: rope(c).update(YARN), lambda c: c.update(original_max_position_embeddings=64))


@EVERY_FORMAT
def test_a_draft_vocabulary_of_all_tokens_is_the_vocabulary(name):
    assert reading_of(name, lambda c: c.update(draft_vocab_size=19)).config == UNCHANGED[name].config
    assert reading_of(name, lambda c: c.update(draft_vocab_size=19)).config.draft_vocab_size is None
    assert reading_of(name, lambda c: c.update(draft_vocab_size=6)).config.draft_vocab_size == 6
    nested = {"dflash_config": FORMATS[name][0].get("dflash_config", {}) | {"draft_vocab_size": 19}}
    if name != "speculators":
        assert_left_over_silently(name, lambda c: c.update(nested))


@EVERY_FORMAT
def test_sliding_layers_that_another_key_denies_are_doubtful(name):
    sliding = {"layer_types": WINDOW["layer_types"], "sliding_window": 4, "use_sliding_window": False}
    reading = reading_of(name, lambda c: layers(c).update(sliding))
    assert reading.config.layer_types == tuple(WINDOW["layer_types"])
    assert "use_sliding_window=False contradicts the sliding layers" in said(reading, doubtful=True)[0]


@pytest.mark.parametrize("name", [name for name in FORMATS if name != "speculators"])
def test_taps_under_two_names_have_to_agree(name):
    content = FORMATS[name][0]
    taps = content.get("dflash_config", content)["target_layer_ids"]
    for key in ("eagle_aux_hidden_state_layer_ids", "aux_hidden_state_layer_ids"):
        same = reading_of(name, lambda c, key=key: c.update({key: [tap + 1 for tap in taps]}))
        assert same.remarks == () and same.unread_keys == ()
        other = reading_of(name, lambda c, key=key: c.update({key: taps}))
        assert other.config == same.config
        assert f"{key}={taps} is ignored, though it names other layers" in said(other, doubtful=True)[0]


def test_a_tied_embedding_says_nothing_where_both_are_the_targets():
    bare = exports.without_embeddings(FORMATS["DeepSpec"][1])
    shapes = {name: list(tensor.shape) for name, tensor in bare.items()}
    tied = FORMATS["DeepSpec"][0] | {"tie_word_embeddings": True}
    assert read_content(tied, origin="config.json", shapes=shapes).unread_keys == ()
    with pytest.raises(CheckpointError, match=r"tie_word_embeddings=True beside an own embed_tokens.weight"):
        read_content(tied, origin="config.json", shapes=shapes | {"embed_tokens.weight": [19, 24]})


QWEN3_5 = {
    "attn_output_gate": True,
    "full_attention_interval": 4,
    "linear_num_key_heads": 16,
    "mamba_ssm_dtype": "float32",
    "mtp_num_hidden_layers": 1,
    "partial_rotary_factor": 0.25,
    "rope_parameters": {
        "rope_theta": 10000.0,
        "rope_type": "default",
        "partial_rotary_factor": 0.25,
        "mrope_interleaved": True,
        "mrope_section": [2, 1, 1],
    },
    "text_config": {"hidden_size": 128},
    "vision_config": {"depth": 27},
}


@pytest.fixture
def copied(golden_dir, tmp_path):
    """``copied(**keys) -> Path`` of the golden drafter with keys of its target's configuration."""

    def copied(**keys):
        folder = shutil.copytree(golden_dir / "vanilla_g7", tmp_path / "draft", copy_function=shutil.copyfile)
        content = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps(content | keys))
        return folder

    return copied


@pytest.mark.slow
@pytest.mark.parametrize("keys", [QWEN3_5, {"draft_vocab_size": 256}], ids=["Qwen3.5", "the size of the vocabulary"])
def test_a_drafter_with_copied_keys_is_the_golden_one(golden_dir, copied, keys):
    """Every recorded draft is drafted again."""
    report = replay(golden_dir / "target", copied(**keys))
    assert report.checked["draft"] == 61
    assert report.mismatches == []


def test_log_and_doctor_say_what_was_ignored(copied, caplog):
    from sglang_dspark.draft.weights import ResolvedDrafter
    from sglang_dspark.tools.doctor import _describe_drafter
    from sglang_dspark.worker.drafter import log_remarks

    folder = copied(**QWEN3_5, eagle_aux_hidden_state_layer_ids=[0, 2, 4])
    sentences = {remark.sentence: remark.doubtful for remark in read(folder).remarks}
    assert len(sentences) == 5 and list(sentences.values()).count(True) == 1
    found = {finding.found: finding.status for finding in _describe_drafter(ResolvedDrafter.read(folder))}
    with caplog.at_level(logging.INFO):
        log_remarks(str(folder), read(folder))
    logged = {record.getMessage().partition(": ")[2]: record.levelno for record in caplog.records}
    unread = "keys of config.json not read: attn_output_gate, full_attention_interval, linear_num_key_heads"
    assert [status for said, status in found.items() if said.startswith(unread)] == ["note"]
    assert any(unread in record.getMessage() for record in caplog.records)
    for sentence, doubtful in sentences.items():
        assert found[sentence] == ("note" if doubtful else "ok")
        assert logged[sentence] == (logging.WARNING if doubtful else logging.INFO)
