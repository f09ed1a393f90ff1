"""The route that a frozen drafter takes on CUDA against the plain one."""

import pytest
import torch
from reference_decoding import ContextKV, attend_dense

from sglang_dspark.draft.weights import load_draft_model

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
