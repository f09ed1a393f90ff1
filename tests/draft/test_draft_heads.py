"""Markov and confidence heads alone: teacher forcing equals stepping, the rnn's old-state rule, inputs and dtypes."""

import dataclasses

import pytest
import torch
from dspark_training.block_forward import block_latents
from reference_decoding import markov_step

from sglang_dspark.draft.formats import read_content
from sglang_dspark.draft.heads import ConfidenceHead
from sglang_dspark.draft.model import DraftModel


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


def test_the_rnn_state_is_required(config):
    with pytest.raises(ValueError, match="initial_state"):
        markov_step(build(config, "rnn").markov_head, torch.tensor([1]), torch.randn(1, 24), None)


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
    with pytest.raises(ValueError, match="reads Markov embeddings"):
        head(hidden, None)
