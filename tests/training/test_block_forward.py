"""Blocks of many anchors at once see what the reference shows them one by one, whatever the network's switches."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from dspark_training.block_forward import block_hidden, context_kv
from reference_decoding import ContextKV, draft_block

from sglang_dspark.draft.formats import read_config
from sglang_dspark.draft.model import DraftModel

GOLDEN = Path(__file__).parents[1] / "data" / "golden" / "vanilla_g7"
SLIDING = {"layer_types": ("sliding_attention", "full_attention"), "sliding_window": 4}
SWITCHES = {
    "as DeepSpec's": {},
    "DFlash layout": {"sample_from_anchor": False},
    "window from the anchor": SLIDING | {"window_from_anchor": True},
    "window from the slot, causal": SLIDING | {"causal_layers": (True, False)},
    "causal": {"causal_layers": (False, True)},
    "sinks, value scale": {"sink_layers": (True, True), "attention_value_scale": 1.5},
    "biases": {"attention_bias": True},
}


@pytest.mark.parametrize("switches", SWITCHES.values(), ids=SWITCHES.keys())
@torch.no_grad()
def test_blocks_of_all_anchors_equal_those_of_the_reference(switches):
    config = replace(read_config(GOLDEN), **switches)
    torch.manual_seed(7)
    model = DraftModel(config)
    for parameter in model.parameters():
        parameter.normal_(std=0.3)
    features = torch.randn(2, 11, config.num_taps * config.hidden_size)
    anchors, ids = torch.tensor([[1, 6, 10], [2, 3, 9]]), torch.tensor([[7, 8, 9], [30, 31, 32]])
    hidden = block_hidden(model, *context_kv(model, features), anchors, ids)
    for text in range(2):
        for block in range(3):
            context = ContextKV(model)
            context.append(features[text, : anchors[text, block]])
            expected = draft_block(model, context, int(ids[text, block])).hidden
            torch.testing.assert_close(hidden[text, block], expected, atol=1e-4, rtol=0)
