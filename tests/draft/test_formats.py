"""Formats: the same drafter written in each of them is the same drafter."""

from dataclasses import replace

import format_exports as exports
import pytest
import torch
from canonical_drafter import config_json, proposed_tokens, random_tensors
from reference_decoding import ContextKV, draft_block

from sglang_dspark.draft.formats import read
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
