"""Attention over the blocks of many anchors, against one query at a time in plain torch."""

from itertools import product

import pytest
import torch
from canonical_drafter import config_json
from dspark_training import attention
from dspark_training.attention import ChunkedAttention
from dspark_training.block_forward import block_hidden, context_kv
from reference_decoding import ContextKV, draft_block
from switches import SWITCHES

from sglang_dspark.draft.formats import read_content
from sglang_dspark.draft.model import DraftModel

# Float32 sums in another order.
TOLERANCE = {"atol": 2e-6, "rtol": 1e-5}
# Odd in every respect, and unused anchors after the used ones of the second text.
ANCHORS = torch.tensor([[1, 6, 7, 10, 12], [2, 3, 9, 0, 0]])
CTX_LEN, SLOTS, LAYERS = 13, 5, 2
KINDS = ["biases", "window from the anchor", "window from the slot", "causal block", "sinks", "everything"]


@pytest.fixture(params=KINDS)
def config(request):
    sizes = {"num_attention_heads": 6, "num_key_value_heads": 2, "head_dim": 10, "block_size": SLOTS}
    return read_content(config_json(**sizes, **SWITCHES[request.param]), origin="").config


@pytest.fixture
def tensors(config):
    """k_ctx, v_ctx, q, k, v of the blocks, and sinks where the layers have any."""
    torch.manual_seed(0)
    heads, kv_heads, head_dim = config.num_attention_heads, config.num_key_value_heads, config.head_dim
    context = [torch.randn(LAYERS, len(ANCHORS), CTX_LEN, kv_heads, head_dim) for _ in range(2)]
    blocks = [torch.randn(ANCHORS.numel() * SLOTS, count, head_dim) for count in (heads, kv_heads, kv_heads)]
    return context + blocks + [torch.linspace(-1, 4, heads) if config.sink_layers else None]


def learnable(tensors):
    return [None if x is None else x.clone().requires_grad_() for x in tensors]


def literal(config, layer, k_ctx, v_ctx, q, k, v, sinks):
    """Row by row, head by head."""
    visibility = config.visibilities[layer]
    group = config.num_attention_heads // config.num_key_value_heads
    mixed = []
    slots = torch.arange(SLOTS)
    for (text, block), slot, head in product(
        ((t, b) for t in range(len(ANCHORS)) for b in range(ANCHORS.shape[1])),
        range(SLOTS),
        range(config.num_attention_heads),
    ):
        anchor, kv_head = int(ANCHORS[text, block]), head // group
        first = (text * ANCHORS.shape[1] + block) * SLOTS
        ages = anchor - torch.arange(anchor)
        before = visibility.sees_context(ages, torch.tensor(slot)).nonzero()[:, 0]
        own = first + visibility.sees_block(slots)[slot].nonzero()[:, 0]
        keys = torch.cat([k_ctx[layer, text, before, kv_head], k[own, kv_head]])
        values = torch.cat([v_ctx[layer, text, before, kv_head], v[own, kv_head]])
        weights = (keys @ q[first + slot, head] * config.attention_scale).exp()
        mixed.append(weights / (weights.sum() + (0 if sinks is None else sinks[head].exp())) @ values)
    return torch.stack(mixed).view(q.shape)


@pytest.mark.parametrize("chunk", [1, 2000, 2**24], ids=["single anchors", "a few anchors", "all at once"])
def test_chunks_equal_the_literal_form_with_their_gradients(chunk, config, tensors, monkeypatch):
    monkeypatch.setattr(attention, "CHUNK_SCORES", chunk)
    found, expected = (learnable(tensors) for _ in range(2))
    attend = ChunkedAttention(*found[:2], ANCHORS, config)
    for layer in range(LAYERS):
        mixed, by_hand = attend(layer, *found[2:]), literal(config, layer, *expected)
        torch.testing.assert_close(mixed, by_hand, **TOLERANCE)
        weights = torch.randn_like(mixed)
        (mixed * weights).sum().backward()
        (by_hand * weights).sum().backward()
    for ours, theirs in zip(found, expected, strict=True):
        if ours is None:
            continue
        torch.testing.assert_close(ours.grad, theirs.grad, atol=1e-5, rtol=1e-5)


def test_a_chunk_bounds_what_is_held(config, tensors, monkeypatch):
    """Autograd keeps no scores of several chunks, and no softmax sees more than a chunk."""
    sizes = []
    softmax = torch.Tensor.softmax

    def recorded(scores, *arguments, **options):
        sizes.append(scores.numel())
        return softmax(scores, *arguments, **options)

    monkeypatch.setattr(torch.Tensor, "softmax", recorded)
    monkeypatch.setattr(attention, "CHUNK_SCORES", 2500)
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda x: kept.append(x.numel()) or x, lambda x: x):
        found = learnable(tensors)
        mixed = ChunkedAttention(*found[:2], ANCHORS, config)(0, *found[2:])
    mixed.sum().backward()
    assert len(sizes) == 2 * 3  # five anchors, two at a time, forward and again backward
    assert max(sizes) <= 2500
    assert max(kept) <= max(x.numel() for x in tensors if x is not None)


@pytest.mark.parametrize("switches", SWITCHES.values(), ids=SWITCHES)
@torch.no_grad()
def test_blocks_of_all_anchors_equal_those_of_the_reference(switches):
    config = read_content(config_json(**switches), origin="").config
    torch.manual_seed(7)
    model = DraftModel(config)
    for parameter in model.parameters():
        parameter.normal_(std=0.3)
    if model.token_ids is not None:
        model.token_ids.copy_(torch.arange(len(model.token_ids)))
    features = torch.randn(2, 11, config.num_taps * config.hidden_size)
    anchors, ids = torch.tensor([[1, 6, 10], [2, 3, 9]]), torch.tensor([[7, 8, 9], [10, 11, 12]])
    hidden = block_hidden(model, *context_kv(model, features), anchors, ids)
    for text in range(2):
        for block in range(3):
            context = ContextKV(model)
            context.append(features[text, : anchors[text, block]])
            expected = draft_block(model, context, int(ids[text, block])).hidden
            torch.testing.assert_close(hidden[text, block], expected, atol=1e-4, rtol=0)
