"""Formats: the same drafter written in each of them is the same drafter; what cannot be served is refused by name."""

import json
from dataclasses import replace

import format_exports as exports
import pytest
import torch
from canonical_drafter import config_json, proposed_tokens, random_tensors
from safetensors.torch import save_file

from sglang_dspark.draft.formats import read, read_content
from sglang_dspark.draft.reference import ContextKV, draft_block
from sglang_dspark.draft.weights import load_draft_model
from sglang_dspark.errors import CheckpointError

NO_HEADS = {
    "markov_rank": 0,
    "markov_head_type": ...,
    "enable_confidence_head": False,
    "confidence_head_with_markov": ...,
}
DFLASH = NO_HEADS | {"sample_from_anchor": False, "block_size": 6}
BARE_CONFIDENCE = {"confidence_head_with_markov": False}
YARN = {
    "rope_parameters": {"rope_theta": 500.0, "rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16}
}
WINDOW = {
    "layer_types": ["full_attention", "sliding_attention"],
    "sliding_window": 4,
    "window_from_anchor": True,
}

CASES = {
    "DeepSpec": (exports.deepspec, "DeepSpec", {}),
    "Ling": (exports.ling, "DeepSpec", {}),
    "SpecForge, rewritten": (exports.hoisted, "DeepSpec", {}),
    "SpecForge": (exports.specforge, "SpecForge", {}),
    "SpecForge, rnn": (exports.specforge, "SpecForge", {"markov_head_type": "rnn"}),
    "SpecForge, no Markov features": (exports.specforge, "SpecForge", BARE_CONFIDENCE),
    "SpecForge, YaRN": (exports.specforge, "SpecForge", YARN),
    "SpecForge, early": (exports.specforge_two_sections, "SpecForge", {"markov_head_type": "gated"}),
    "ModelOpt": (exports.modelopt, "ModelOpt", {"markov_head_type": "gated"}),
    "ModelOpt, rnn": (exports.modelopt, "ModelOpt", {"markov_head_type": "rnn"}),
    "TorchSpec": (exports.torchspec, "TorchSpec", {}),
    "TorchSpec, DFlash layout": (exports.torchspec, "TorchSpec", {"sample_from_anchor": False}),
    "TorchSpec, gated": (exports.torchspec, "TorchSpec", {"markov_head_type": "gated"} | BARE_CONFIDENCE),
    "DFlash": (exports.dflash, "DFlash", DFLASH),
    "DFlash, sinks": (exports.dflash, "DFlash", DFLASH | {"sink_layers": [True, True]}),
    "ModelOpt, sinks in one layer": (exports.modelopt, "ModelOpt", {"sink_layers": [False, True]}),
    "TorchSpec, value scale": (exports.torchspec, "TorchSpec", {"attention_value_scale": 0.7}),
    "speculators, sinks": (exports.speculators, "speculators", {"sink_layers": [True, True]}),
    "DeepSpec, sinks in one layer": (exports.deepspec, "DeepSpec", {"sink_layers": [True, False]}),
    "speculators": (exports.speculators, "speculators", {}),
    "speculators, DFlash layout": (exports.speculators, "speculators", {"sample_from_anchor": False}),
    "speculators, windows": (exports.speculators, "speculators", WINDOW | {"causal_layers": [False, False]}),
    "speculators, causal windows": (exports.speculators, "speculators", WINDOW | {"causal_layers": [False, True]}),
    "speculators, reduced vocabulary": (exports.speculators, "speculators", {"draft_vocab_size": 6}),
    "speculators, DFlash": (exports.speculators, "speculators", DFLASH),
    "speculators, biases": (exports.speculators, "speculators", {"attention_bias": True}),
}


@pytest.fixture
def write(tmp_path):
    """``write(config, tensors) -> Path`` of a new checkpoint."""

    def write(config, tensors):
        folder = tmp_path / f"draft{len(list(tmp_path.iterdir()))}"
        folder.mkdir()
        (folder / "config.json").write_text(json.dumps(config))
        save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, folder / "model.safetensors")
        return folder

    return write


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


@pytest.mark.parametrize(("export", "name", "overrides"), CASES.values(), ids=CASES.keys())
def test_every_format_of_one_drafter_loads_to_the_same(make_checkpoint, write, export, name, overrides):
    canonical = load(make_checkpoint(drop=("embed_tokens.weight", "lm_head.weight"), **overrides))
    config = config_json(**overrides)
    content, tensors = export(config, exports.without_embeddings(random_tensors(config, seed=0)))
    if proposed := config.get("draft_vocab_size"):
        tensors |= exports.reduced(proposed_tokens(proposed), config["vocab_size"])
    folder = write(content, tensors)
    reading = read(folder)
    assert (reading.format, reading.unknown_keys) == (name, ())
    model, expected = load(folder), canonical.state_dict()
    unknown_depth = {"num_target_layers": None} if reading.config.num_target_layers is None else {}
    assert model.config == replace(canonical.config, num_anchors=reading.config.num_anchors, **unknown_depth)
    assert model.state_dict().keys() == expected.keys()
    assert all(torch.equal(tensor, expected[key]) for key, tensor in model.state_dict().items())
    (tokens, logits), (expected_tokens, expected_logits) = drafts(model), drafts(canonical)
    assert tokens == expected_tokens
    assert torch.equal(logits, expected_logits)


def neighbours(config, tensors):
    content, tensors = exports.specforge(config, tensors)
    return content | {"rope_is_neox_style": False}, exports.neighbouring_pairs(config, tensors)


def leading_pairs(config, tensors):
    """Half of the channels rotate, the first ones of a head: pairs (0, 2) and (1, 3), the other four stand still."""
    content, tensors = exports.specforge(config, tensors)
    order = [0, 1, 4, 5, 2, 3, 6, 7]  # places here of the channels there
    for name in [n for n in tensors if "self_attn" in n and any(part in n for part in ("q_", "k_"))]:
        tensors[name] = torch.cat([head[order] for head in tensors[name].split(8)])
    return content | {"partial_rotary_factor": 0.5}, tensors


@pytest.mark.parametrize(
    ("export", "rope"),
    [(neighbours, {}), (leading_pairs, {"partial_rotary_factor": 0.5, "rotary_pairs": "whole_head"})],
    ids=["neighbouring pairs", "leading pairs"],
)
def test_channels_are_put_in_order_where_a_format_pairs_them_differently(make_checkpoint, write, export, rope):
    parameters = {"rope_theta": 500.0, "rope_type": "default", **rope}
    canonical = load(make_checkpoint(drop=("embed_tokens.weight", "lm_head.weight"), rope_parameters=parameters))
    config = config_json()
    model = load(write(*export(config, random_tensors(config, seed=0))))
    assert all(torch.equal(model.state_dict()[key], tensor) for key, tensor in canonical.state_dict().items())
    assert drafts(model)[0] == drafts(canonical)[0]


FLIPS = {
    "numbers of the taps": (exports.speculators, lambda c: c.update(aux_hidden_state_layer_ids=[3, 4, 1])),
    "order of the taps": (exports.modelopt, lambda c: c["dflash_config"]["target_layer_ids"].sort()),
    "layout": (exports.torchspec, lambda c: c.update(sample_from_anchor=False)),
    "layout by the number of drafts": (
        exports.speculators,
        lambda c: c["speculators_config"]["proposal_methods"][0].update(speculative_tokens=4),
    ),
    "causal block": (exports.modelopt, lambda c: c["dflash_config"].update(causal=True)),
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
    config = config_json(**WINDOW, causal_layers=[False, True])
    tensors = exports.without_embeddings(random_tensors(config, seed=0))
    anchored = load(write(*exports.speculators(config, tensors)))
    content, tensors = exports.specforge(config, tensors)
    slides = load(write(content | {"sliding_window": 4}, tensors))
    assert [v.from_anchor for v in anchored.config.visibilities] == [True, True]
    assert slides.config == replace(anchored.config, window_from_anchor=False, num_target_layers=4, num_anchors=None)
    assert drafts(anchored)[0] != drafts(slides)[0]


def test_a_value_scale_that_is_overlooked_makes_another_drafter(write):
    config = config_json(attention_value_scale=0.5)
    content, tensors = exports.specforge(config, exports.without_embeddings(random_tensors(config, seed=0)))
    scaled = load(write(content, tensors))
    assert content.pop("attention_value_scale") == 0.5
    assert drafts(scaled)[0] != drafts(load(write(content, tensors)))[0]


SINK = "layers.{}.self_attn.attention_sink_bias"


def test_sinks_are_what_keys_and_tensors_say_together(write):
    config = config_json(**WINDOW, sink_layers=[True, True])
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


def content_of(export, **overrides):
    config = config_json(**overrides)
    return export(config, exports.without_embeddings(random_tensors(config, seed=0)))


def read_export(export, change=lambda content: None, with_tensors=True, **overrides):
    content, tensors = content_of(export, **overrides)
    change(content)
    shapes = {name: list(tensor.shape) for name, tensor in tensors.items()} if with_tensors else {}
    return read_content(content, origin="config.json", shapes=shapes).config


def forget_drafts(content):
    del content["speculators_config"]


@pytest.mark.parametrize(
    ("export", "change", "overrides"),
    [
        (exports.speculators, forget_drafts, {}),
        (
            exports.speculators,
            lambda c: c["speculators_config"]["proposal_methods"][0].update(speculative_tokens=2),
            {},
        ),
        (exports.torchspec, lambda c: c.pop("sample_from_anchor"), {}),
    ],
)
def test_an_open_question_is_asked(export, change, overrides):
    with pytest.raises(CheckpointError, match=r"does the slot of the anchor predict.*--set sample_from_anchor=true"):
        read_export(export, change, **overrides)
    answered = read_export(export, lambda c: (change(c), c.update(sample_from_anchor=False)), **overrides)
    assert not answered.sample_from_anchor


def test_speculators_files_of_dflash_need_no_answer():
    assert not read_export(exports.speculators, forget_drafts, **DFLASH).sample_from_anchor


def forget_heads(content):
    for place in (content, content.get("dflash_config", {})):
        for key in (*exports.HEAD_KEYS, "confidence_head_alpha"):
            place.pop(key, None)


@pytest.mark.parametrize("overrides", [{}, {"markov_head_type": "rnn"}, BARE_CONFIDENCE, NO_HEADS])
def test_heads_that_no_key_describes_are_seen_in_the_tensors(overrides):
    config = read_export(exports.specforge, forget_heads, **overrides)
    expected = read_content(config_json(**overrides), origin="").config
    for key in exports.HEAD_KEYS:
        assert getattr(config, key) == getattr(expected, key)


def test_without_tensors_each_format_has_its_own_defaults():
    ours = read_export(exports.specforge, forget_heads, with_tensors=False)
    assert (ours.markov_rank, ours.enable_confidence_head) == (0, False)
    theirs = read_export(exports.speculators, forget_heads, with_tensors=False)
    assert (theirs.markov_rank, theirs.markov_head_type, theirs.confidence_head_with_markov) == (256, "vanilla", True)


def test_layers_of_speculators_have_the_defaults_of_their_class():
    content, _ = content_of(exports.speculators)
    content["transformer_layer_config"] = {"model_type": "qwen3", "num_hidden_layers": 5}
    config = read_content(content, origin="config.json").config
    assert (config.hidden_size, config.head_dim, config.rope_theta, config.vocab_size) == (4096, 128, 10_000.0, 151936)
    content["transformer_layer_config"] = {"model_type": "llama", "hidden_size": 64, "num_attention_heads": 4}
    content["draft_vocab_size"] = 32000
    config = read_content(content, origin="config.json").config
    assert (config.head_dim, config.num_key_value_heads, config.max_position_embeddings) == (16, 4, 2048)
    content["transformer_layer_config"] = {"model_type": "other"}
    with pytest.raises(CheckpointError, match=r"key 'transformer_layer_config.hidden_size' is missing"):
        read_content(content, origin="config.json")


REFUSED = {
    "speculators of another kind": ({"speculators_model_type": "xpress"}, "speculators_model_type='xpress'.*refiner"),
    "MLA": ({"model_type": "k3_dspark"}, "model_type='k3_dspark' is not supported: its attention is latent"),
    "fused": ({"dspark_target_layer_ids": [40]}, "a drafter inside its target"),
    "Gemma": ({"architectures": ["Gemma4DSparkModel"]}, "architectures=.'Gemma4DSparkModel'.*layers are Gemma's"),
    "MiniMax": ({"architectures": ["DSparkMiniMaxDraftModel"]}, "MiniMax"),
    "Muse": ({"architectures": ["MuseSparkDSparkModel"]}, "Muse Spark"),
    "Laguna": ({"architectures": ["DFlashLagunaForCausalLM"]}, "Laguna"),
    "DFlash2": ({"architectures": ["DFlashDraftModel"], "dflash_config": {"selector_rank": 256}}, "DFlash2"),
    "LiLiCorr": ({"dflash_config": {"lilicorr_rank": 1}}, "LiLiCorr"),
    "Domino": ({"dflash_config": {"projector_type": "domino"}}, "Domino"),
    "MLA in SpecForge": (
        {"architectures": ["DSparkDraftModel"], "dflash_config": {"attention_mode": "mla", "projector_type": "dspark"}},
        "attention_mode='mla' is not supported",
    ),
    "quantised": ({"quantization_config": {"bits": 4}}, "quantization_config=.* is not supported"),
    "softcap": ({"final_logit_softcapping": 30.0}, "final_logit_softcapping=30.0 is not supported"),
    "contradiction": ({"dflash_config": {"block_size": 4}}, "block_size=5 contradicts dflash_config.block_size=4"),
    "no target's layer": ({"target_layer_ids": []}, "target_layer_ids="),
    "rnn in the layout of DFlash": (
        {"markov_head_type": "rnn", "sample_from_anchor": False},
        "markov_head_type='rnn' with sample_from_anchor=false is not supported",
    ),
    "no format at all": ({"architectures": ["Qwen3ForCausalLM"]}, "formats that load are DeepSpec"),
}


@pytest.mark.parametrize(("change", "message"), REFUSED.values(), ids=REFUSED.keys())
def test_other_networks_are_refused_by_name(change, message):
    with pytest.raises(CheckpointError, match=message):
        read_content(config_json(**change), origin="config.json")


def test_tensors_tell_networks_apart_that_config_json_does_not():
    for name in ("mtp.0.main_proj.weight", "prefix_gru.weight_ih_l0", "refiner_head.in_proj.weight"):
        with pytest.raises(CheckpointError, match=r"is not supported: its layers|is not supported: it has"):
            read_content(content_of(exports.dflash, **DFLASH)[0], origin="", shapes={name: [4, 4]})


def test_a_quantised_folder_is_refused(write):
    folder = write(*content_of(exports.modelopt))
    (folder / "hf_quant_config.json").write_text("{}")
    with pytest.raises(CheckpointError, match=r"hf_quant_config.json: the drafter is quantised"):
        read(folder)


def test_a_layer_that_fc_reads_beside_the_listed_ones_is_seen(write):
    content, tensors = content_of(exports.speculators)
    tensors["fc.weight"] = torch.zeros(24, 4 * 24)
    with pytest.raises(CheckpointError, match="reads 4 layers of the target, but aux_hidden_state_layer_ids names 3"):
        read(write(content, tensors))


def test_unknown_keys_are_named():
    content, _ = content_of(exports.specforge)
    content["dflash_config"]["new_switch"] = 3
    reading = read_content(content | {"other": 1}, origin="config.json")
    assert reading.unknown_keys == ("dflash_config.new_switch", "other")


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda t: t.pop("d2t"), r"no list of its tokens \(tensor d2t\)"),
        (lambda t: t.update(d2t=t["d2t"].flip(0)), "does not list 6 ascending tokens"),
        (lambda t: t.update(d2t=t["d2t"] + 13), "does not list 6 ascending tokens"),
        (lambda t: t.update(t2d=~t["t2d"]), "that t2d marks too"),
        (lambda t: t.update(t2d=t["t2d"][:-1].clone()), "that t2d marks too"),
    ],
)
def test_damaged_reduced_vocabularies_are_refused(write, damage, message):
    content, tensors = content_of(exports.speculators, draft_vocab_size=6)
    tensors |= exports.reduced(proposed_tokens(6), 19)
    damage(tensors)
    with pytest.raises(CheckpointError, match=message):
        load_draft_model(write(content, tensors), dtype=torch.float32, device="cpu")


def test_an_own_lm_head_of_a_reduced_vocabulary_is_kept_where_it_differs(write):
    content, tensors = content_of(exports.speculators, draft_vocab_size=6)
    ids = proposed_tokens(6)
    tensors |= exports.reduced(ids, 19)
    target = torch.randn(19, 24)
    for head, shared in (
        (target[ids], ("embed_tokens.weight", "lm_head.weight")),
        (target[ids] + 1, ("embed_tokens.weight",)),
    ):
        folder = write(content, tensors | {"lm_head.weight": head})
        model = load_draft_model(folder, dtype=torch.float32, device="cpu")
        assert model.bind_target(torch.randn(19, 24), target) == shared
        assert torch.equal(model.lm_head_weight, head)


ODD = [None, "x", "", -1, 0, 2.5, 1e400, [], [[]], [None], ["x"], [1], [{}], {}, {"a": 1}, True, False]


def with_odd_values(content):
    """The config with one of its values, at any depth, replaced by something else."""
    for key, value in content.items():
        yield from (content | {key: odd} for odd in ODD)
        if isinstance(value, dict):
            yield from (content | {key: inner} for inner in with_odd_values(value))


@pytest.mark.parametrize(
    "content",
    [
        config_json(**WINDOW, causal_layers=[True, False], sink_layers=[True, False]),
        content_of(exports.specforge, **YARN)[0] | {"use_sliding_window": True, "max_window_layers": 1},
        content_of(exports.modelopt)[0] | {"attention_sink_bias": True, "attention_value_scale": 2.0},
        content_of(exports.torchspec)[0] | {"sliding_window": 4, "layer_types": ["sliding_attention"] * 2},
        content_of(exports.speculators, **WINDOW)[0],
    ],
    ids=["DeepSpec", "SpecForge", "ModelOpt", "TorchSpec", "speculators"],
)
def test_whatever_a_file_holds_is_read_or_refused(content):
    shapes = {"markov_head.markov_w1.weight": [], "confidence_head.proj.weight": [], "d2t": [], "fc.weight": [1]}
    read_well, messages = 0, []
    for odd in with_odd_values(content):
        for stored in ({}, shapes):
            try:
                read_content(odd, origin="config.json", shapes=stored)
                read_well += 1
            except CheckpointError as error:
                messages.append(str(error))
    assert read_well > 50
    assert len(messages) > 50
    assert all(message.startswith("config.json: ") for message in messages)
