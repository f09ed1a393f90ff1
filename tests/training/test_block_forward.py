"""Blocks of many anchors at once see what the reference shows them one by one, whatever the network's switches."""

import pytest
import torch
from canonical_drafter import config_json
from dspark_training.block_forward import block_hidden, context_kv
from reference_decoding import ContextKV, draft_block
from switches import SWITCHES

from sglang_dspark.draft.formats import read_content
from sglang_dspark.draft.model import DraftModel


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
