"""Everything that formats say and leave open: read, asked for, or refused by name, whatever a file holds."""

import format_exports as exports
import pytest
import torch
from canonical_drafter import config_json, proposed_tokens
from format_exports import BARE_CONFIDENCE, DFLASH, NO_HEADS, WINDOW, YARN, content_of

from sglang_dspark.draft.formats import read, read_content
from sglang_dspark.draft.weights import check_draft_model, load_draft_model
from sglang_dspark.errors import CheckpointError


def read_export(export, change=lambda content: None, with_tensors=True, **overrides):
    content, tensors = content_of(export, **overrides)
    change(content)
    shapes = {name: list(tensor.shape) for name, tensor in tensors.items()} if with_tensors else {}
    return read_content(content, origin="config.json", shapes=shapes).config


def forget_drafts(content):
    del content["speculators_config"], content["sample_from_anchor"]


def other_number_of_drafts(content):
    del content["sample_from_anchor"]
    content["speculators_config"]["proposal_methods"][0]["speculative_tokens"] = 2


@pytest.mark.parametrize(
    ("export", "change", "overrides"),
    [
        (exports.speculators, forget_drafts, {}),
        (exports.speculators, other_number_of_drafts, {}),
        (exports.torchspec, lambda c: c.pop("sample_from_anchor"), {}),
    ],
)
def test_an_open_question_is_asked(export, change, overrides):
    with pytest.raises(CheckpointError, match="sample_from_anchor"):
        read_export(export, change, **overrides)
    answered = read_export(export, lambda c: (change(c), c.update(sample_from_anchor=False)), **overrides)
    assert not answered.sample_from_anchor


def test_speculators_files_of_dflash_need_no_answer():
    assert not read_export(exports.speculators, forget_drafts, **DFLASH).sample_from_anchor


def forget_heads(content):
    for section in (content, content.get("dflash_config", {})):
        for key in (*exports.HEAD_KEYS, "confidence_head_alpha"):
            section.pop(key, None)


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
    with pytest.raises(CheckpointError, match=r"'transformer_layer_config.hidden_size'"):
        read_content(content, origin="config.json")


REFUSED = {
    "speculators of another kind": (
        {"speculators_model_type": "xpress"},
        "model_type='xpress'",
    ),
    "Qwen's keys for Gemma's layers": ({"architectures": ["Gemma4DSparkModel"]}, "'global_head_dim'"),
    "MiniMax": ({"architectures": ["DSparkMiniMaxDraftModel"]}, "DSparkMiniMaxDraftModel"),
    "DFlash 2 without its shortlist": ({"markov_head_type": "selector"}, "selector_top_k=None"),
    "a shortlist of nothing": ({"markov_head_type": "selector", "selector_top_k": 0}, "selector_top_k=0"),
    "groups that divide nothing": (
        {"conv_kernel_size": 2, "conv_group_size": 7},
        "conv_group_size=7.*hidden_size=24",
    ),
    "convolutions of no group": ({"conv_kernel_size": 2}, "conv_group_size=0.*conv_kernel_size=2"),
    "convolutions beyond the block": ({"conv_kernel_size": 9, "conv_group_size": 2}, "conv_kernel_size=9"),
    "a mask of its own": ({"mask_embedding": [0.5]}, r"mask_embedding=\[0.5\]"),
    "states of another width": ({"dflash_config": {"target_hidden_size": 48}}, "target_hidden_size=48"),
    "MLA in SpecForge": (
        {"architectures": ["DSparkDraftModel"], "dflash_config": {"attention_mode": "mla", "projector_type": "dspark"}},
        "attention_mode='mla'",
    ),
    "softcap of no size": ({"final_logit_softcapping": -1.0}, "final_logit_softcapping=-1.0"),
    "softcap of scores": ({"attn_logit_softcapping": 50.0}, "attn_logit_softcapping=50.0"),
    "contradiction": ({"dflash_config": {"block_size": 4}}, "block_size=5.*dflash_config.block_size=4"),
    "no target's layer": ({"target_layer_ids": []}, "target_layer_ids="),
    "rnn in the layout of DFlash": (
        {"markov_head_type": "rnn", "sample_from_anchor": False},
        "markov_head_type='rnn'.*sample_from_anchor=false",
    ),
}


CLASSES = {
    "architectures": ({"architectures": ["FooDSparkModel"]}, "architectures: FooDSparkModel"),
    "an own class": ({"architectures": ["K3DSparkModel"]}, "architectures: K3DSparkModel"),
    "a target": ({"architectures": ["Qwen3ForCausalLM"]}, "architectures: Qwen3ForCausalLM .*a target"),
    "auto_map": ({"auto_map": {"AutoModel": "org/other--foo.FooDFlashModel"}}, "auto_map: FooDFlashModel"),
    "an own class in auto_map": (
        {"auto_map": {"AutoModelForCausalLM": "laguna.DFlashLagunaForCausalLM"}},
        "auto_map: DFlashLagunaForCausalLM",
    ),
}


@pytest.mark.parametrize(("change", "message"), CLASSES.values(), ids=CLASSES.keys())
@pytest.mark.parametrize(
    "export", [exports.deepspec, exports.specforge, exports.modelopt, exports.torchspec, exports.speculators]
)
def test_a_class_with_layers_of_its_own_is_refused_whatever_its_tensors_look_like(export, change, message, write):
    content, tensors = content_of(export)
    with pytest.raises(CheckpointError, match=message):
        read(write(content | change, tensors))
    read(write(content | {"auto_map": {"AutoModel": "modeling_minimax.MiniMaxForCausalLM"}}, tensors))  # the target's


def test_a_class_of_another_name_is_read_if_its_author_says_that_it_is_one_of_these(write):
    content, tensors = content_of(exports.torchspec)
    with pytest.raises(CheckpointError, match="architectures, such as DFlashDraftModel"):
        read(write(content | CLASSES["auto_map"][0], tensors))
    answered = content | CLASSES["architectures"][0] | CLASSES["auto_map"][0]
    answered |= {"architectures": ["DFlashDraftModel"], "auto_map": None}
    assert read(write(answered, tensors)).format == "TorchSpec"


def windows_at_the_top(content):
    """Move the keys of windows from the layers to where vLLM reads them as well."""
    layers = content["transformer_layer_config"]
    keys = ("layer_types", "sliding_window", "use_sliding_window", "max_window_layers")
    return content | {key: layers.pop(key) for key in keys} | {"max_window_layers": 2}


def test_windows_of_speculators_may_stand_next_to_the_layers():
    content, _ = content_of(exports.speculators, **WINDOW, causal_layers=[False, True])
    expected = read_content(content, origin="")
    assert expected.config.causal_layers == (False, True) and expected.config.sliding_window == 4
    moved = windows_at_the_top(content)
    found = read_content(moved, origin="")
    assert found.config == expected.config and found.unread_keys == expected.unread_keys
    derived = {key: value for key, value in moved.items() if key != "layer_types"} | {"max_window_layers": 1}
    assert read_content(derived, origin="").config == expected.config
    for key, other in (("sliding_window", 8), ("layer_types", ["full_attention"] * 2)):
        moved["transformer_layer_config"][key] = other
        with pytest.raises(CheckpointError, match=f"transformer_layer_config.{key}=.* {key}="):
            read_content(moved, origin="")
        moved["transformer_layer_config"][key] = None


def test_windows_that_two_engines_would_read_differently():
    """``layer_types`` and ``use_swa`` disagree, or two sizes."""
    content, _ = content_of(exports.specforge, **WINDOW, causal_layers=[False, True])
    content["sliding_window"] = 4
    plain = read_content(content, origin="").config
    assert plain.layer_types == ("full_attention", "sliding_attention")
    content["dflash_config"]["use_swa"] = True
    reading = read_content(content, origin="")
    assert reading.config == plain and [remark.doubtful for remark in reading.remarks] == [True]
    content["dflash_config"]["swa_window_size"] = 8
    with pytest.raises(CheckpointError, match=r"dflash_config.swa_window_size=8.*sliding_window=4"):
        read_content(content, origin="")
    del content["sliding_window"]
    assert read_content(content, origin="").config.sliding_window == 8


def test_keys_of_a_drafter_in_a_section_of_eagle():
    """VLLM reads that section before ``dflash_config``."""
    content, _ = content_of(exports.specforge)
    content["eagle_config"] = {"eagle_aux_hidden_state_layer_ids": [0, 2, 3], "use_aux_hidden_state": True}
    assert read_content(content, origin="").unread_keys == ()
    content["eagle_config"]["eagle_aux_hidden_state_layer_ids"] = [0, 1, 3]
    [remark] = read_content(content, origin="").remarks
    assert remark.doubtful and remark.sentence.startswith("eagle_config.eagle_aux_hidden_state_layer_ids=[0, 1, 3]")
    content["eagle_config"] = {"use_aux_hidden_state": False}
    with pytest.raises(CheckpointError, match=r"eagle_config.use_aux_hidden_state=False"):
        read_content(content, origin="")


@pytest.mark.parametrize(("change", "message"), REFUSED.values(), ids=REFUSED.keys())
def test_other_networks_are_refused_by_name(change, message):
    with pytest.raises(CheckpointError, match=message):
        read_content(config_json(**change), origin="config.json")


def test_an_embedding_of_the_mask_next_to_the_tensors_is_not_passed_over(write):
    folder = write(*content_of(exports.dflash, **DFLASH))
    (folder / "mask_embedding.pt").touch()
    with pytest.raises(CheckpointError, match=r"mask_embedding.pt"):
        read(folder)


def test_tensors_tell_networks_apart_that_config_json_does_not(write):
    content, tensors = content_of(exports.dflash, **DFLASH)
    for name in ("mtp.0.main_proj.weight", "prefix_gru.weight_ih_l0", "refiner_head.in_proj.weight"):
        folder = write(content, tensors | {name: torch.zeros(4, 4)})
        with pytest.raises(CheckpointError, match=f"unexpected {name}"):
            check_draft_model(folder)


def test_a_layer_that_fc_reads_besides_the_listed_ones_is_seen(write):
    content, tensors = content_of(exports.speculators)
    tensors["fc.weight"] = torch.zeros(24, 4 * 24)
    with pytest.raises(CheckpointError, match=r"4 layers .*aux_hidden_state_layer_ids names 3"):
        read(write(content, tensors))


def test_unread_keys_are_named():
    content, _ = content_of(exports.specforge)
    content["dflash_config"]["new_switch"] = 3
    reading = read_content(content | {"other": 1}, origin="config.json")
    assert reading.unread_keys == ("dflash_config.new_switch", "other")


@pytest.mark.parametrize(
    "damage",
    [
        lambda t: t.pop("d2t"),
        lambda t: t.update(d2t=t["d2t"].flip(0)),
        lambda t: t.update(d2t=t["d2t"] + 13),
        lambda t: t.update(d2t=t["d2t"][:5].clone()),
        lambda t: t.update(t2d=~t["t2d"]),
        lambda t: t.update(t2d=t["t2d"].roll(1)),
        lambda t: t.update(t2d=t["t2d"][:-1].clone()),
    ],
)
def test_damaged_reduced_vocabularies_are_refused(write, damage):
    content, tensors = content_of(exports.speculators, draft_vocab_size=6)
    tensors |= exports.reduced(proposed_tokens(6), 19)
    damage(tensors)
    with pytest.raises(CheckpointError, match="d2t"):
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
