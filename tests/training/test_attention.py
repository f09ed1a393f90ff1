"""Attention over the blocks of many anchors, against one query at a time in plain torch."""

from dataclasses import replace
from itertools import product
from pathlib import Path

import pytest
import torch
from dspark_training import attention
from dspark_training.attention import ChunkedAttention

from sglang_dspark.draft.formats import read_config

GOLDEN = Path(__file__).parents[1] / "data" / "golden" / "vanilla_g7"
# Float32 sums in another order.
TOLERANCE = {"atol": 2e-6, "rtol": 1e-5}
# Odd in every respect, and unused anchors behind the used ones of the second text.
ANCHORS = torch.tensor([[1, 6, 7, 10, 12], [2, 3, 9, 0, 0]])
CTX_LEN, SLOTS, LAYERS = 13, 5, 2
SLIDING = {"layer_types": ("sliding_attention", "full_attention"), "sliding_window": 4}
SWITCHES = {
    "full": {},
    "window from the anchor": SLIDING | {"window_from_anchor": True},
    "window from the slot": SLIDING,
    "causal": {"causal_layers": (False, True)},
    "sinks": SLIDING | {"sink_layers": (True, True)},
}


@pytest.fixture(params=SWITCHES.values(), ids=SWITCHES.keys())
def config(request):
    sizes = {"num_attention_heads": 6, "num_key_value_heads": 2, "head_dim": 10, "num_hidden_layers": LAYERS}
    return replace(read_config(GOLDEN), **({"layer_types": (), "block_size": SLOTS} | sizes | request.param))


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
