"""Tests of the drafter against a literal float64 implementation and against recorded vectors.

Markov and confidence heads are also tested without the rest: teacher forcing equals stepping.
"""

import dataclasses
import itertools
import json
import shutil

import pytest
import torch
from canonical_drafter import GEMMA
from dspark_training.block_forward import block_latents
from golden_replay import load_golden, load_target, replay
from literal import LiteralDraft
from reference_decoding import ContextKV, decode_greedy, draft_block, markov_step
from safetensors.torch import load_file, save_file
from switches import SWITCHES

from sglang_dspark.draft.formats import read_content
from sglang_dspark.draft.heads import ConfidenceHead
from sglang_dspark.draft.model import DraftModel
from sglang_dspark.draft.weights import load_draft_model

TOLERANCE = 2e-4  # float32 against float64 on logits of size ~10; a wrong formula is off by more than 0.1


NO_MARKOV = {"markov_rank": 0, "markov_head_type": ..., "confidence_head_with_markov": False}
SLIDING = {"layer_types": ["full_attention", "sliding_attention"], "sliding_window": 4}


def rope(head_dim=8, **parameters):
    return {"rope_parameters": {"rope_theta": 500.0, **parameters}, "head_dim": head_dim}


CASES = SWITCHES | {
    "vanilla, block 5": {},
    "gated, block 4": {"markov_head_type": "gated", "block_size": 4},
    "rnn, block 6": {"markov_head_type": "rnn", "block_size": 6},
    "rnn, block 1": {"markov_head_type": "rnn", "block_size": 1},
    "rank 0, confidence": NO_MARKOV | {"block_size": 7},
    "rank 0, no confidence": NO_MARKOV | {"enable_confidence_head": False},
    "gated, confidence without markov": {"markov_head_type": "gated", "confidence_head_with_markov": False},
    "single layer, single tap": {"num_hidden_layers": 1, "layer_types": ..., "target_layer_ids": [-1]},
    "no grouping, wide heads": {"num_attention_heads": 3, "num_key_value_heads": 3, "head_dim": 16},
    "coarse eps": {"rms_norm_eps": 0.3},
    "DFlash layout, two slots, gated": {"sample_from_anchor": False, "markov_head_type": "gated", "block_size": 2},
    "window from the anchor, causal": SLIDING | {"window_from_anchor": True, "causal_layers": [False, True]},
    "window from the slot, narrower than the block": SLIDING | {"sliding_window": 3, "causal_layers": [True, True]},
    "window of one": SLIDING | {"sliding_window": 1, "layer_types": ["sliding_attention"] * 2},
    "sliding layers are causal unless told otherwise": SLIDING,
    "reduced vocabulary, rnn": {"draft_vocab_size": 6, "markov_head_type": "rnn"},
    "sinks in one layer, window from the slot": SLIDING | {"sink_layers": [False, True]},
    "sinks with YaRN's factor": rope(rope_type="yarn", factor=8.0, attention_factor=1.7)
    | {"sink_layers": [True, False]},
    "softcap, reduced vocabulary": {"final_logit_softcapping": 0.7, "draft_vocab_size": 6},
    "value scale, biases, sinks": {"attention_value_scale": 2.5, "attention_bias": True, "sink_layers": [True, True]},
    "Gemma's layers, own values": GEMMA | {"attention_k_eq_v": False, "final_logit_softcapping": ...},
    "YaRN, own factors": rope(
        rope_type="yarn", factor=8.0, mscale=0.7, mscale_all_dim=0.3, beta_fast=4.0, truncate=False
    ),
    "YaRN, attention factor": rope(rope_type="yarn", factor=8.0, attention_factor=1.7),
}


@pytest.mark.parametrize("overrides", CASES.values(), ids=CASES.keys())
@torch.no_grad()
def test_drafting_matches_the_literal_loop(make_checkpoint, overrides):
    path = make_checkpoint(seed=11, **overrides)
    literal, model = LiteralDraft(path), load_draft_model(path, dtype=torch.float32, device="cpu")
    features = torch.randn(9, model.config.num_taps * model.config.hidden_size)
    context = ContextKV(model)
    for rows in features.split([4, 1, 3, 1]):  # as prefill and three verify rounds would deliver them
        context.append(rows)
    for anchor in (0, 7, 18):
        block = draft_block(model, context, anchor)
        tokens, hidden, base_logits, logits, confidences = literal.draft(features.double(), anchor)
        assert block.tokens == tokens
        pairs = [(block.hidden, hidden), (block.base_logits, base_logits), (block.logits, logits)]
        if confidences:
            pairs.append((block.confidence_logits, confidences))
        else:
            assert block.confidence_logits is None
        for got, expected in pairs:
            torch.testing.assert_close(got.double(), torch.stack(expected), atol=TOLERANCE, rtol=0)


@pytest.mark.parametrize(
    "overrides", [{"num_hidden_layers": 3, "layer_types": ...}, GEMMA, GEMMA | {"attention_k_eq_v": False}]
)
@torch.no_grad()
def test_context_kv_equals_each_layers_own_projection(make_checkpoint, overrides):
    path = make_checkpoint(**overrides)
    literal, model = LiteralDraft(path), load_draft_model(path, dtype=torch.float32, device="cpu")
    h_ctx, positions = torch.randn(4, 24), torch.tensor([0, 1, 17, 200])
    k, v = model.context_kv(h_ctx, positions)
    for layer, row in itertools.product(range(len(k)), range(4)):
        name = f"layers.{layer}.self_attn."
        x = h_ctx[row].double()
        position = positions[row].item()
        expected_k = literal.heads(x, name + "k_proj.weight", name + "k_norm.weight", position)
        expected_v = literal.values(x, name)
        torch.testing.assert_close(k[layer, row].double(), torch.stack(expected_k), atol=1e-4, rtol=0)
        torch.testing.assert_close(v[layer, row].double(), torch.stack(expected_v), atol=1e-4, rtol=0)


def context_kv(model):
    generator = torch.Generator().manual_seed(5)
    h_ctx = torch.randn(6, 24, generator=generator).to(model.fc.weight.dtype)
    return torch.stack(model.context_kv(h_ctx, torch.arange(6)))


def test_the_frozen_stack_is_the_layers_own_storage(make_checkpoint):
    path = make_checkpoint()
    model, other = (load_draft_model(p, dtype=torch.float32, device="cpu") for p in (path, make_checkpoint(seed=1)))
    own = model.layers[0].self_attn.k_proj.weight, model.layers[1].self_attn.v_proj.weight
    assert own[0].untyped_storage().data_ptr() == own[1].untyped_storage().data_ptr()
    model.load_state_dict(other.state_dict())
    torch.testing.assert_close(context_kv(model), context_kv(other), atol=0, rtol=0)


def test_a_cast_model_does_not_keep_the_old_stack(make_checkpoint):
    model = load_draft_model(make_checkpoint(), dtype=torch.float32, device="cpu")
    exact = context_kv(model)
    half = context_kv(model.to(torch.bfloat16))
    assert half.dtype == torch.bfloat16
    torch.testing.assert_close(half.float(), exact, atol=0.1, rtol=0.02)


def test_a_model_in_training_learns_through_the_context(make_checkpoint):
    model = load_draft_model(make_checkpoint(), dtype=torch.float32, device="cpu")
    frozen = context_kv(model)
    model.requires_grad_().train()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    context_kv(model).square().mean().backward()
    for layer in model.layers:
        for module in (layer.self_attn.k_proj, layer.self_attn.v_proj, layer.self_attn.k_norm):
            assert module.weight.grad.abs().max() > 0
    optimizer.step()
    learned = context_kv(model)
    assert (learned - frozen).abs().max() > 1e-4
    torch.testing.assert_close(context_kv(model.freeze()), learned, atol=1e-6, rtol=0)


def test_rms_norm_statistics_are_float32_in_bfloat16(make_checkpoint):
    model = load_draft_model(make_checkpoint(hidden_size=512), dtype=torch.bfloat16, device="cpu")
    x = torch.full((1, 512), 300.0, dtype=torch.bfloat16)
    x[0, ::2] = 1.0
    expected = x.double() / x.double().square().mean().sqrt() * model.norm.weight.double()
    torch.testing.assert_close(model.norm(x).double(), expected, atol=1e-5, rtol=2**-7)


def test_rotary_angles_stay_exact_in_a_half_precision_model_at_long_positions(make_checkpoint):
    model = load_draft_model(make_checkpoint(head_dim=64), dtype=torch.bfloat16, device="cpu")
    positions = torch.tensor([0, 1, 40_000])
    cos, sin = model.rotary(positions)
    angles = positions.double()[:, None] * 500.0 ** (-torch.arange(0, 64, 2).double() / 64)
    assert cos.shape == sin.shape == (3, 1, 32) and cos.dtype == sin.dtype == torch.float32
    # One float32 rounding of an angle of 40000 radians is about 2e-3.
    torch.testing.assert_close(cos[:, 0].double(), angles.cos(), atol=5e-3, rtol=0)
    torch.testing.assert_close(sin[:, 0].double(), angles.sin(), atol=5e-3, rtol=0)


def test_every_recorded_value_is_reproduced(golden_dir):
    report = replay(golden_dir / "target", golden_dir / "vanilla_g7")
    assert report.mismatches == []
    assert report.checked == {
        "anchor": 61,
        "draft": 61,
        "accepted": 55,  # the last round of each case may be cut by the token limit
        "block_hidden": 36,
        "base_logits": 36,
        "logits": 36,
        "confidence_logits": 36,
    }


def test_the_reference_decodes_as_recorded(golden_dir):
    """It is what servers and the trainer are compared with."""
    golden = load_golden(golden_dir / "vanilla_g7")
    model = load_draft_model(golden_dir / "vanilla_g7", dtype=torch.float32, device="cpu")
    target = load_target(golden_dir / "target", model)
    for case in golden.cases[:2]:
        decoded = decode_greedy(
            model, target, case.prompt_ids, max_new_tokens=golden.max_new_tokens, stop_token_ids=golden.stop_token_ids
        )
        assert decoded.output_ids == case.output_ids
        assert [(r.start, r.anchor, r.block.tokens) for r in decoded.rounds] == [
            (r.start, r.anchor, r.draft) for r in case.rounds
        ]


def test_each_recorded_value_is_compared(golden_dir, tmp_path):
    """Replays the first two cases, which take well under a second."""
    draft = shutil.copytree(golden_dir / "vanilla_g7", tmp_path / "draft")
    content = json.loads((draft / "golden.json").read_text())
    del content["cases"][2:]
    rounds = content["cases"][1]["rounds"]
    rounds[2]["draft"][6] ^= 1
    rounds[3]["accepted"] ^= 1
    (draft / "golden.json").write_text(json.dumps(content))
    recorded = load_file(draft / "golden.safetensors")
    tensors = {key: tensor for key, tensor in recorded.items() if key.startswith(("c0.", "c1."))}
    tensors["c0.r5.base_logits"].view(-1)[3].add_(2e-4)
    tensors["c1.r0.block_hidden"].view(-1)[3].fill_(float("nan"))
    save_file(tensors, draft / "golden.safetensors")
    assert set(replay(golden_dir / "target", draft).mismatches) == {
        ("draft", 1, 2),
        ("accepted", 1, 2),  # the target does not accept the altered last draft
        ("accepted", 1, 3),
        ("base_logits", 0, 5),
        ("block_hidden", 1, 0),
    }


@pytest.fixture
def config(make_config):
    return read_content(make_config(), origin="test").config


def build(config, head):
    return DraftModel(dataclasses.replace(config, markov_head_type=head)).requires_grad_()


def block_bias(model, prev_tokens, hidden):
    """Return the biases of whole blocks as the trainer computes them."""
    return model.markov_head.markov_w2(block_latents(model, prev_tokens, hidden)[0])


@pytest.mark.parametrize("head", ["vanilla", "gated", "rnn"])
def test_teacher_forcing_equals_walking_the_block(config, head):
    model = build(config, head)
    markov = model.markov_head
    prev_tokens, hidden = torch.randint(19, (3, 6)), torch.randn(3, 6, 24)
    state = markov.initial_state(3, torch.device("cpu"), torch.float32)
    biases = []
    for slot in range(6):
        bias, w1_embedding, state = markov_step(markov, prev_tokens[:, slot], hidden[:, slot], state)
        assert bias.shape == (3, 19)
        assert torch.equal(w1_embedding, markov.markov_w1.weight[prev_tokens[:, slot]])
        biases.append(bias)
    torch.testing.assert_close(block_bias(model, prev_tokens, hidden), torch.stack(biases, dim=1))


@pytest.mark.parametrize("head", ["vanilla", "gated", "rnn"])
def test_block_bias_trains_every_parameter(config, head):
    model = build(config, head)
    markov = model.markov_head
    block_bias(model, torch.randint(19, (2, 5)), torch.randn(2, 5, 24)).square().sum().backward()
    assert all(p.grad is not None and p.grad.abs().max() > 0 for p in markov.parameters())


def test_confidence_is_float32_arithmetic_on_half_precision_inputs(config):
    head = ConfidenceHead(config).bfloat16()
    hidden, embedding = torch.randn(4, 24).bfloat16(), torch.randn(4, 7).bfloat16()
    logits = head(hidden, embedding)
    features = torch.cat((hidden, embedding), dim=-1).double()
    expected = features @ head.proj.weight[0].double() + head.proj.bias.double()
    assert logits.dtype == torch.float32 and logits.shape == (4,)
    with torch.autocast("cpu", dtype=torch.bfloat16):  # in training
        assert torch.equal(head(hidden, embedding), logits)
    torch.testing.assert_close(logits.double(), expected, atol=1e-5, rtol=0)
