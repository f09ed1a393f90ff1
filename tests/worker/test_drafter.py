"""Drafting of a batch from the paged cache, by torch and by the kernels, against the reference one by one."""

from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from dspark_kernels import RoundKeys, SamplingBatch
from dspark_kernels.dispatch import kernels_anywhere
from reference_decoding import ContextKV, draft_block

from sglang_dspark.draft.formats import read_config
from sglang_dspark.draft.model import DraftModel
from sglang_dspark.draft.reduced_vocabulary import ProposalHeads
from sglang_dspark.draft.rope import RopeScaling
from sglang_dspark.step.state import DecodeBatch
from sglang_dspark.worker.drafter import Drafter

GOLDEN = Path(__file__).parents[1] / "data" / "golden" / "vanilla_g7"
PREFIXES = (1, 17)
NO_HEADS = {
    "markov_rank": 0,
    "markov_head_type": None,
    "enable_confidence_head": False,
    "confidence_head_with_markov": False,
}
SLIDING = {"layer_types": ("sliding_attention", "full_attention"), "sliding_window": 5}
SWITCHES = {
    "as DeepSpec's": {},
    "DFlash": NO_HEADS | {"sample_from_anchor": False, "block_size": 5},
    "DFlash layout, gated": {"sample_from_anchor": False, "markov_head_type": "gated"},
    "window from the anchor": SLIDING | {"window_from_anchor": True},
    "window from the anchor, causal": SLIDING | {"window_from_anchor": True, "causal_layers": (True, False)},
    "window from the slot": SLIDING | {"causal_layers": (True, False)},
    "reduced vocabulary, rnn": {"draft_vocab_size": 50, "markov_head_type": "rnn"},
    "YaRN, biases": {"rope_scaling": RopeScaling(rope_type="yarn", factor=8.0), "attention_bias": True},
    "sinks, value scale": {"sink_layers": (True, False), "attention_value_scale": 0.6, "attention_bias": True},
    "some pairs rotate": {"partial_rotary_factor": 0.5},
}


CASES = [(name, False) for name in SWITCHES] + [
    ("DFlash", True),
    ("window from the anchor, causal", True),
    ("window from the slot", True),
    ("sinks, value scale", True),
    ("reduced vocabulary, rnn", True),
    ("YaRN, biases", True),
]


@pytest.mark.parametrize(("name", "on_gpu"), CASES, ids=[f"{n}, {'kernels' if gpu else 'torch'}" for n, gpu in CASES])
@torch.no_grad()
def test_a_batch_is_drafted_as_the_reference_drafts_each_request(name, on_gpu):
    config = replace(read_config(GOLDEN), **SWITCHES[name])
    generator = torch.Generator().manual_seed(11)
    model = DraftModel(config)
    for key, parameter in model.named_parameters():
        std = 1.0 if "markov" in key or "embed" in key else 0.5 if parameter.ndim == 1 else 0.15
        parameter.normal_(std=std, generator=generator)
    if model.token_ids is not None:
        model.token_ids.copy_(3 * torch.arange(config.num_proposed) + 2)
    model.freeze()
    anchors = torch.tensor([9, 42])
    features = [torch.randn(n, config.num_taps * config.hidden_size, generator=generator) for n in PREFIXES]
    expected = []
    for anchor, rows in zip(anchors.tolist(), features, strict=True):
        context = ContextKV(model)
        context.append(rows)
        expected.append(draft_block(model, context, anchor))

    device = torch.device("cpu")
    heads = ProposalHeads(model, None)
    drafter = Drafter(config, model, heads, gamma=config.gamma, device=device, features=lambda ids, captured: captured)
    table = torch.randperm(6 * 40, generator=generator, dtype=torch.int32).view(6, 40) + 1
    drafter.allocate(241, torch.float32)
    requests, lens = torch.tensor([4, 0]), torch.tensor(PREFIXES)
    for request, rows in zip(requests, features, strict=True):
        positions = torch.arange(len(rows))
        drafter.inject(positions, rows, positions, table[request, : len(rows)].long())
    step = DecodeBatch(
        anchors=anchors,
        prefix_lens=lens,
        req_pool_indices=requests,
        req_to_token=table,
        rows=SamplingBatch.from_lists([0.0] * 2, [-1] * 2, [1.0] * 2, [0.0] * 2, [None] * 2),
        keys=RoundKeys(0, 0, torch.arange(2), lens),
    )
    for depth in (2,) if on_gpu else (config.gamma, 2):
        with kernels_anywhere() if on_gpu else nullcontext():
            block = drafter.propose(step, depth, with_confidence=True)
        assert block.tokens.tolist() == [one.tokens[:depth] for one in expected]
        if config.enable_confidence_head:
            confidence = torch.stack([one.confidence_logits[:depth] for one in expected])
            torch.testing.assert_close(block.confidence_logits, confidence, atol=1e-3, rtol=1e-3)
