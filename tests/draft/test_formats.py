"""Tests of formats: one drafter written in each of them is one drafter.

Keys that trainers copy from the target change nothing, and what was made of each is said.
"""

import json
import logging
import shutil
from dataclasses import replace

import format_exports as exports
import pytest
import torch
from canonical_drafter import config_json, proposed_tokens, random_tensors
from format_exports import DFLASH, WINDOW, content_of
from golden_replay import replay
from reference_decoding import ContextKV, draft_block

from sglang_dspark.draft.formats import read, read_content
from sglang_dspark.draft.formats.layers import LEFT_OVER, PART_OF_HEAD
from sglang_dspark.draft.weights import load_draft_model
from sglang_dspark.errors import CheckpointError


def load(folder):
    """The drafter on a random target."""
    model = load_draft_model(folder, dtype=torch.float32, device="cpu")
    generator = torch.Generator().manual_seed(4)
    size = model.config.vocab_size, model.config.hidden_size
    model.bind_target(*(torch.randn(size, generator=generator) for _ in range(2)))
    return model


@torch.no_grad()
def drafts(model):
    """Drafts after a context of twelve rows, and their logits."""
    features = torch.randn(12, 72, generator=torch.Generator().manual_seed(5))
    context = ContextKV(model)
    context.append(features)
    blocks = [draft_block(model, context, anchor) for anchor in (1, 7, 16)]
    return [block.tokens for block in blocks], torch.stack([block.logits for block in blocks])


@pytest.mark.parametrize(("export", "name", "overrides"), exports.CASES.values(), ids=exports.CASES.keys())
def test_every_format_of_one_drafter_loads_to_the_same(make_checkpoint, write, export, name, overrides):
    canonical = load(make_checkpoint(drop=("embed_tokens.weight", "lm_head.weight"), **overrides))
    config = config_json(**overrides)
    content, tensors = export(config, exports.without_embeddings(random_tensors(config, seed=0)))
    if proposed := config.get("draft_vocab_size"):
        tensors |= exports.reduced(proposed_tokens(proposed), config["vocab_size"])
    folder = write(content, tensors)
    reading = read(folder)
    assert reading.format == name
    assert {*reading.unread_keys} <= {"num_experts", "moe_intermediate_size"}  # Ling has them of its target
    model, expected = load(folder), canonical.state_dict()
    unknown_depth = {"num_target_layers": None} if reading.config.num_target_layers is None else {}
    assert model.config == replace(canonical.config, num_anchors=reading.config.num_anchors, **unknown_depth)
    assert model.state_dict().keys() == expected.keys()
    assert all(torch.equal(tensor, expected[key]) for key, tensor in model.state_dict().items())
    (tokens, logits), (expected_tokens, expected_logits) = drafts(model), drafts(canonical)
    assert tokens == expected_tokens
    assert torch.equal(logits, expected_logits)


def leading_pairs(config, tensors):
    """Half of the channels rotate, the first ones of a head: pairs (0, 2) and (1, 3), the other four stand still."""
    content, tensors = exports.specforge(config, tensors)
    order = [0, 1, 4, 5, 2, 3, 6, 7]  # index here of the channels there
    for name in [n for n in tensors if "self_attn" in n and any(part in n for part in ("q_", "k_"))]:
        tensors[name] = torch.cat([head[order] for head in tensors[name].split(8)])
    return content | {"partial_rotary_factor": 0.5, "rotary_pairs": "leading"}, tensors


def leading_pairs_of_sglang(config, tensors):
    content, tensors = leading_pairs(config, tensors)
    del content["rotary_pairs"]
    return content | {"rope_scaling": {"rope_type": "default", "rope_dim": 4}}, tensors


PART = {"partial_rotary_factor": 0.5, "rotary_pairs": "whole_head"}


@pytest.mark.parametrize(
    ("export", "rope"),
    [(exports.neighbours, {}), (leading_pairs, PART), (leading_pairs_of_sglang, PART)],
    ids=["neighbouring pairs", "leading pairs", "leading pairs, by their number"],
)
def test_channels_are_put_in_order_where_a_format_pairs_them_differently(make_checkpoint, write, export, rope):
    parameters = {"rope_theta": 500.0, "rope_type": "default", **rope}
    canonical = load(make_checkpoint(drop=("embed_tokens.weight", "lm_head.weight"), rope_parameters=parameters))
    config = config_json()
    model = load(write(*export(config, random_tensors(config, seed=0))))
    assert all(torch.equal(model.state_dict()[key], tensor) for key, tensor in canonical.state_dict().items())
    assert drafts(model)[0] == drafts(canonical)[0]


def say_one_draft_less(content):
    """Files of older releases say so, which have no key for the layout."""
    del content["sample_from_anchor"]
    content["speculators_config"]["proposal_methods"][0]["speculative_tokens"] -= 1


FLIPS = {
    "value scale": (exports.specforge, lambda c: c.update(attention_value_scale=0.5)),
    "numbers of the taps": (exports.speculators, lambda c: c.update(aux_hidden_state_layer_ids=[3, 4, 1])),
    "order of the taps": (exports.modelopt, lambda c: c["dflash_config"]["target_layer_ids"].sort()),
    "layout": (exports.torchspec, lambda c: c.update(sample_from_anchor=False)),
    "layout by the number of drafts": (exports.speculators, say_one_draft_less),
    "causal block": (exports.modelopt, lambda c: c["dflash_config"].update(causal=True)),
    "causal block of JetSpec": (exports.torchspec, lambda c: c["dflash_config"].update(causal_head=True)),
    "causal block at the top": (exports.specforge, lambda c: c.update(is_causal=True)),
    "pairs": (exports.specforge, lambda c: c.update(rope_is_neox_style=False)),
    "set of RoPE": (
        exports.speculators,
        lambda c: c["transformer_layer_config"]["rope_parameters"].pop("sliding_attention"),
    ),
    "window": (exports.specforge, lambda c: c.update(layer_types=["sliding_attention"] * 2, sliding_window=4)),
    "window everywhere": (exports.modelopt, lambda c: c["dflash_config"].update(use_swa=True, swa_window_size=4)),
}


@pytest.mark.parametrize(("export", "flip"), FLIPS.values(), ids=FLIPS.keys())
def test_the_conventions_of_a_format_matter(write, export, flip):
    """Read the other way round, each of them makes another drafter of the same tensors."""
    config = config_json(num_target_layers=6)
    content, tensors = export(config, exports.without_embeddings(random_tensors(config, seed=0)))
    straight = load(write(content, tensors))
    flip(content)
    flipped = load(write(content, tensors))
    if straight.config.target_layer_ids != flipped.config.target_layer_ids:
        return  # other layers of the target are read
    (tokens, logits), (flipped_tokens, flipped_logits) = drafts(straight), drafts(flipped)
    assert tokens != flipped_tokens
    shared = min(logits.shape[1], flipped_logits.shape[1])
    assert (logits[:, :shared] - flipped_logits[:, :shared]).abs().max() > 0.1


def test_windows_of_the_two_rules_are_told_apart(write):
    config = config_json(**exports.WINDOW, causal_layers=[False, True])
    tensors = exports.without_embeddings(random_tensors(config, seed=0))
    anchored = load(write(*exports.speculators(config, tensors)))
    content, tensors = exports.specforge(config, tensors)
    slides = load(write(content | {"sliding_window": 4}, tensors))
    assert [v.from_anchor for v in anchored.config.visibilities] == [True, True]
    assert slides.config == replace(anchored.config, window_from_anchor=False, num_target_layers=4, num_anchors=None)
    assert drafts(anchored)[0] != drafts(slides)[0]


SINK = "layers.{}.self_attn.attention_sink_bias"


def test_sinks_are_what_keys_and_tensors_say_together(write):
    config = config_json(**exports.WINDOW, sink_layers=[True, True])
    content, tensors = exports.specforge(config, exports.without_embeddings(random_tensors(config, seed=0)))
    content |= {"sliding_window": 4}
    one = {name: tensor for name, tensor in tensors.items() if name != SINK.format(0)}
    assert content.pop("attention_sink_bias") is True
    nested = content | {"dflash_config": content["dflash_config"] | {"attention_sink_bias": True}}
    for changed, stored, expected in (
        (content, tensors, (True, True)),
        (content, one, (False, True)),
        (content | {"add_swa_attention_sink_bias": True}, one, (False, True)),
        (nested, tensors, (True, True)),
    ):
        assert load(write(changed, stored)).config.sink_layers == expected
    with pytest.raises(CheckpointError, match=r"unexpected layers.0.self_attn.attention_sink_bias"):
        load(write(content | {"attention_sink_bias": False}, tensors))
    with pytest.raises(CheckpointError, match=r"missing layers.0.self_attn.attention_sink_bias \[6\]"):
        load(write(content | {"attention_sink_bias": True}, one))


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
    """The keys change nothing except one sentence."""
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
    ("use_sliding_window=True is ignored: no layer of the drafter has a sliding window", layers, SLIDES),
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


def test_an_original_length_next_to_the_layers_counts_where_rope_reads_it():
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
    with pytest.raises(CheckpointError, match=r"tie_word_embeddings=True next to an own embed_tokens.weight"):
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
    unread = "these keys of config.json are not read: attn_output_gate, full_attention_interval, linear_num_key_heads"
    assert [status for said, status in found.items() if said.startswith(unread)] == ["note"]
    assert any(unread in record.getMessage() for record in caplog.records)
    for sentence, doubtful in sentences.items():
        assert found[sentence] == ("note" if doubtful else "ok")
        assert logged[sentence] == (logging.WARNING if doubtful else logging.INFO)
