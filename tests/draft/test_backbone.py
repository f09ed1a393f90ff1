"""Tests of the drafter's layers: Gemma 4's against those of transformers, and the fused route against the plain one.

Against the literal drafter they stand in test_draft_model.py and tests/worker/test_worker.py.
"""

import json

import pytest
import torch
from canonical_drafter import GEMMA, config_json
from reference_decoding import ContextKV, attend_dense
from safetensors.torch import load_file
from transformers import Gemma4UnifiedTextConfig
from transformers.models.gemma4_unified.modeling_gemma4_unified import Gemma4UnifiedTextModel

from sglang_dspark.draft.formats import read_content
from sglang_dspark.draft.formats.checkpoint import describe
from sglang_dspark.draft.weights import load_draft_model, random_draft_model
from sglang_dspark.errors import CheckpointError

OWN_VALUES = GEMMA | {"attention_k_eq_v": False}
# The text configuration of Gemma 4 12B, as DeepSpec copies it.
PUBLISHED = json.loads("""\
{"architectures": ["Gemma4DSparkModel"], "attention_bias": false, "attention_dropout": 0.0, "attention_k_eq_v": true,
"block_size": 7, "confidence_head_with_markov": true, "enable_confidence_head": true, "enable_moe_block": false,
"final_logit_softcapping": 30.0, "global_head_dim": 512, "head_dim": 256, "hidden_activation": "gelu_pytorch_tanh",
"hidden_size": 3840, "hidden_size_per_layer_input": 0, "intermediate_size": 15360, "layer_types": ["full_attention",
"full_attention", "full_attention", "full_attention", "full_attention"], "markov_head_type": "vanilla",
"markov_rank": 256, "mask_token_id": 4, "max_position_embeddings": 262144, "model_type": "gemma4_unified_text",
"moe_intermediate_size": null, "num_anchors": 512, "num_attention_heads": 16, "num_experts": null,
"num_global_key_value_heads": 1, "num_hidden_layers": 5, "num_key_value_heads": 8, "num_kv_shared_layers": 0,
"num_target_layers": 48, "rms_norm_eps": 1e-06, "rope_parameters": {"full_attention": {"partial_rotary_factor": 0.25,
"rope_theta": 1000000.0, "rope_type": "proportional"}, "sliding_attention": {"rope_theta": 10000.0,
"rope_type": "default"}}, "sliding_window": 1024, "target_layer_ids": [5, 17, 29, 41, 46],
"target_model_type": "gemma4_unified", "target_text_model_type": "gemma4_unified_text", "tie_word_embeddings": false,
"top_k_experts": null, "use_bidirectional_attention": "vision", "use_double_wide_mlp": false, "vocab_size": 262144,
"vocab_size_per_layer_input": 262144}
""")


def load(path, dtype=torch.float32):
    return load_draft_model(path, dtype=dtype, device="cpu")


def test_the_published_drafter_is_read():
    reading = read_content(PUBLISHED, origin="config.json")
    config = reading.config
    assert reading.format == "DeepSpec"
    assert reading.unread_keys == ("use_bidirectional_attention", "vocab_size_per_layer_input")
    assert describe(config) == (
        "7 drafts per block, 5 layers, taps [5, 17, 29, 41, 46] of 48, vanilla Markov head of rank 256, confidence "
        "head with Markov features, layers of Gemma 4, whose values are the keys, RoPE of type proportional, factor 1, "
        "RoPE of 0.25 of the channel pairs, logits capped at 30"
    )
    assert (config.head_dim, config.num_key_value_heads, config.attention_scale, config.embed_scale) == (
        *(512, 1, 1.0),
        3840**0.5,
    )
    assert not any(remark.doubtful for remark in reading.remarks)


@pytest.mark.parametrize("keys", [GEMMA, OWN_VALUES], ids=["keys are values", "own values"])
@torch.no_grad()
def test_a_block_without_context_is_one_of_transformers(make_checkpoint, keys):
    path = make_checkpoint(seed=4, **keys)
    config, model = json.loads((path / "config.json").read_text()), load(path)
    sizes = (
        "vocab_size hidden_size intermediate_size num_hidden_layers num_attention_heads num_key_value_heads head_dim "
        "rms_norm_eps global_head_dim num_global_key_value_heads attention_k_eq_v rope_parameters layer_types "
        "max_position_embeddings"
    ).split()
    theirs = Gemma4UnifiedTextModel(
        Gemma4UnifiedTextConfig(**{name: config[name] for name in sizes}, use_bidirectional_attention="all")
    ).eval()
    theirs.config._attn_implementation = "eager"
    stored = load_file(path / "model.safetensors")
    own = {name: tensor for name, tensor in stored.items() if name.startswith(("layers.", "norm.", "embed_tokens."))}
    assert theirs.load_state_dict(own, strict=False).missing_keys == []

    def attend(layer, q, k, v, sinks):
        return attend_dense(q, k, v, scale=model.config.attention_scale)

    ids, positions = torch.tensor([7, 3, 3, 3, 3]), torch.arange(40, 45)
    embeds = model.embed(ids)
    torch.testing.assert_close(embeds, theirs.embed_tokens(ids), rtol=0, atol=0)
    seen = dict.fromkeys(("full_attention", "sliding_attention"))  # everything
    expected = theirs(inputs_embeds=embeds[None], position_ids=positions[None], attention_mask=seen, use_cache=False)
    torch.testing.assert_close(
        model.forward_block(embeds, positions, attend), expected.last_hidden_state[0], atol=2e-5, rtol=0
    )


def test_a_frozen_drafter_is_plain_and_its_stack_is_the_layers_own(make_checkpoint):
    """There are no fused kernels for Gemma's layers."""
    model = load(make_checkpoint(**GEMMA))
    assert model._fused_layers == [] and model._context_stack is not None
    parts = [layer.self_attn.k_proj.weight for layer in model.decoder_layers]
    assert [part.data_ptr() for part in parts] == [part.data_ptr() for part in model._context_stack.weight.chunk(2)]


def test_the_scale_of_embeddings_is_rounded_as_in_training(make_checkpoint):
    """Whatever the target multiplies with: 62 in bfloat16 for a hidden size of 3840."""
    model = load(make_checkpoint(**GEMMA), torch.bfloat16)
    scale = torch.tensor(24**0.5).bfloat16()
    assert float(scale) != 24**0.5
    weight = torch.randn(19, 24).bfloat16()
    for _ in range(2):
        assert torch.equal(model.embed(torch.arange(19)), model.embed_weight * scale)
        model.embed_tokens = None
        model.bind_target(weight, None, embed_scale=3.0)


def test_random_weights_keep_the_layers_as_they_are(make_checkpoint):
    config = load(make_checkpoint(**GEMMA)).config
    model = random_draft_model(config, dtype=torch.float32, device="cpu")
    assert all(layer.layer_scalar.item() == 1.0 for layer in model.decoder_layers)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"hidden_size_per_layer_input": 256}, "hidden_size_per_layer_input=256 is not supported"),
        ({"enable_moe_block": True}, "enable_moe_block=True is not supported"),
        ({"use_double_wide_mlp": True}, "use_double_wide_mlp=True is not supported"),
        ({"num_kv_shared_layers": 1}, "num_kv_shared_layers=1 is not supported"),
        ({"hidden_activation": "silu"}, "hidden_activation='silu' is not supported"),
        ({"attn_logit_softcapping": 50.0}, "attn_logit_softcapping=50.0 is not supported"),
        ({"attention_bias": True}, "attention_bias=True is not supported in Gemma 4's layers"),
        ({"sink_layers": [True, False]}, "sink_layers=.* is not supported in Gemma 4's layers"),
        ({"attention_value_scale": 0.5}, "attention_value_scale=0.5 is not supported in Gemma 4's layers"),
        ({"layer_types": ["full_attention", "sliding_attention"]}, "sliding_window=4 is not supported in Gemma 4's"),
        ({"global_head_dim": ...}, "key 'global_head_dim' is missing"),
        ({"num_global_key_value_heads": ...}, "key 'num_global_key_value_heads' is missing"),
        ({"attention_k_eq_v": 1}, "attention_k_eq_v=1"),
    ],
)
def test_what_such_layers_do_not_have_is_refused(change, message):
    content = config_json(**GEMMA | change)
    if "layer_types" in change:
        content["rope_parameters"] = content["rope_parameters"]["full_attention"]
    with pytest.raises(CheckpointError, match=message):
        read_content(content, origin="config.json")


DEVICE = "cuda" if torch.cuda.is_available() else "cpu"  # on the CPU Triton's interpreter runs the kernels


def plain_and_fused(model):
    """Hidden states of one block after a context of eleven rows, by either route, and the shapes ``attend`` saw."""
    config, seen = model.config, []
    generator = torch.Generator().manual_seed(2)

    def rand(*size):
        return torch.randn(*size, generator=generator).to(model.fc.weight)

    context = ContextKV(model)
    context.append(rand(11, config.num_taps * config.hidden_size))

    def attend(layer, q, k, v, sinks):
        seen.append((layer, q.shape, k.shape, v.shape))
        keys, values = torch.cat((context.k[layer], k)), torch.cat((context.v[layer], v))
        return attend_dense(q, keys, values, scale=config.attention_scale, sinks=sinks)

    inputs = rand(config.block_size, config.hidden_size), torch.arange(11, 11 + config.block_size, device=DEVICE)
    fused = model.forward_block_fused(*inputs, attend)
    fused_seen = seen.copy()
    seen.clear()
    layers, model._fused_layers = model._fused_layers, []  # on CUDA too the plain route is meant here
    plain = model.forward_block(*inputs, attend)
    model._fused_layers = layers
    assert fused_seen == seen and len(seen) == config.num_hidden_layers
    return plain, fused


EXTRAS = {"sink_layers": [True, False], "attention_value_scale": 0.4, "attention_bias": True}


@pytest.mark.parametrize("extras", [None, EXTRAS], ids=["golden", "extras of the attention"])
@torch.no_grad()
def test_both_routes_agree(golden_dir, make_checkpoint, extras):
    folder = golden_dir / "vanilla_g7" if extras is None else make_checkpoint(**extras)
    plain, fused = plain_and_fused(load_draft_model(folder, dtype=torch.float32, device=DEVICE))
    torch.testing.assert_close(fused, plain, atol=1e-5 * plain.abs().max().item(), rtol=0)


@torch.no_grad()
def test_both_routes_agree_after_an_in_place_load(make_checkpoint):
    """Biases and all."""
    layers = {"num_hidden_layers": 3, "layer_types": ..., "attention_bias": True}
    model, other = (
        load_draft_model(make_checkpoint(seed=seed, **layers), dtype=torch.float32, device=DEVICE) for seed in (0, 1)
    )
    before = plain_and_fused(model)[1]
    model.load_state_dict(other.state_dict())
    plain, fused = plain_and_fused(model)
    assert (fused - before).abs().max() > 1e-2
    torch.testing.assert_close(fused, plain, atol=1e-5 * plain.abs().max().item(), rtol=0)


def test_the_stacks_are_the_layers_own_storage(make_checkpoint):
    model = load_draft_model(make_checkpoint(attention_bias=True), dtype=torch.float32, device="cpu")
    for layer, fused in zip(model.decoder_layers, model._fused_layers, strict=True):
        attention, mlp = layer.self_attn, layer.mlp
        for stack, parts in (
            (fused.kv_weight, (attention.k_proj.weight, attention.v_proj.weight)),
            (fused.kv_bias, (attention.k_proj.bias, attention.v_proj.bias)),
            (fused.gate_up_weight, (mlp.gate_proj.weight, mlp.up_proj.weight)),
        ):
            assert torch.equal(stack, torch.cat(parts))
            assert [part.data_ptr() for part in parts] == [half.data_ptr() for half in stack.chunk(2)]


@pytest.mark.parametrize("change", [lambda model: model.requires_grad_(), lambda model: model.double()])
def test_a_model_that_is_no_longer_constant_takes_the_plain_route(make_checkpoint, change):
    model = load_draft_model(make_checkpoint(), dtype=torch.float32, device="cpu")
    change(model)
    assert model._fused_layers == []
