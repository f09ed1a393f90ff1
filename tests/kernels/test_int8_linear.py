"""Weights in eight bits, and drafters whose layers and heads have such weights."""

from unittest.mock import patch

import pytest
import torch
from canonical_drafter import GEMMA, config_json
from dspark_kernels import Int8Weight, dispatch, int8_linear

from sglang_dspark.draft.formats import read_content
from sglang_dspark.draft.model import DraftModel
from sglang_dspark.draft.reduced_vocabulary import ProposalHeads

IDS = [3, 5, 8, 11]


def test_a_weight_is_rounded_by_half_a_scale_at_most(device):
    weight = torch.randn(5000, 33, device=device)
    weight[7] = 0
    stored = Int8Weight.of(weight)
    assert (stored.codes.abs().amax(1) == 127).sum() == 4999 and (stored.scales > 0).all()
    error = (stored.codes * stored.scales[:, None] - weight).abs()
    assert (error <= 0.5001 * stored.scales[:, None]).all() and not error[7].any()
    assert torch.equal(stored.rounded, stored.codes * stored.scales[:, None])


def test_prompts_are_multiplied_alike(device):
    weight, rows = Int8Weight.of(torch.randn(9, 20, device=device)), torch.randn(3, 300, 20, device=device)
    torch.testing.assert_close(int8_linear(rows, weight), int8_linear.reference(rows, weight), atol=1e-5, rtol=1e-5)
    with pytest.raises(ValueError, match="do not fit"):
        int8_linear(rows[..., 1:], weight)


def made(device, content):
    config = read_content(config_json(**content), origin="").config
    torch.manual_seed(0)
    return DraftModel(config).to(device).freeze()


@pytest.mark.parametrize("content", [{"num_hidden_layers": 3, "layer_types": ...}, {"attention_bias": True}, GEMMA])
def test_a_drafter_in_eight_bits_drafts_as_the_rounded_one(device, content):
    """Without kernels its weights are rounded where they are, except those that it shares with the target."""
    model, rounded = made(device, content), made("cpu", content)
    shared = rounded.lm_head_weight.clone()
    with patch.object(dispatch, "_anywhere", []):
        of_rounded = ProposalHeads(rounded.store_in_eight_bits(), IDS)
    heads = ProposalHeads(model.store_in_eight_bits(), IDS)
    assert torch.equal(rounded.lm_head_weight, shared)
    assert isinstance(heads.weights.markov.w2, Int8Weight) and not isinstance(of_rounded.weights.markov.w2, Int8Weight)
    config = model.config
    features = torch.randn(5, config.num_taps * config.hidden_size)
    embeds, positions = torch.randn(2, 4, config.hidden_size), torch.arange(8).view(2, 4)
    found = []
    for each, each_heads in ((model, heads), (rounded, of_rounded)):
        place = each.norm.weight.device
        context = each.context_projection(each.project_context(features.to(place)))
        hidden = each.forward_block(embeds.to(place), positions.to(place), lambda layer, q, k, v, sinks: q)
        logits = each_heads.base_logits(hidden.flatten(0, -2))
        found.append([part.cpu() for part in (context, hidden, logits)])
    torch.testing.assert_close(*found, atol=1e-4, rtol=1e-4)


def test_stacked_codes_are_the_layers_own(device):
    model = made(device, {"num_hidden_layers": 2, "layer_types": ...}).store_in_eight_bits()
    first, last = model.layers
    stack = model._context_stack.weight.codes
    assert first.self_attn.k_proj.weight.codes.data_ptr() == stack.data_ptr()
    assert first.self_attn.k_proj.weight.rounded.data_ptr() == model._context_stack.weight.rounded.data_ptr()
    assert last.self_attn.v_proj.weight.codes.untyped_storage().data_ptr() == stack.untyped_storage().data_ptr()
    assert [weight for weight in model.layers.parameters() if weight.dim() == 2] == []
