"""Tests of the packed loss against a literal one in float64, of batches of anchors, and of reported means."""

import math
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from accelerate import Accelerator
from dspark_training import loss as loss_module
from dspark_training.anchors import collate, sample_anchors
from dspark_training.loss import LossOutput, LossWeights, draft_loss
from dspark_training.loss_vocabulary import LossVocabulary, VocabularySlice
from dspark_training.report import Sums
from dspark_training.texts import StoredText, Text, keep_states, states_of
from reference_decoding import attend_dense, markov_step

from sglang_dspark.draft.config import MARKOV_HEAD_TYPES
from sglang_dspark.draft.model import DraftModel

WHOLE = VocabularySlice(None, None, None)
WEIGHTS = LossWeights(ce=0.3, l1=0.9, confidence=0.7, position_decay=3.0)
# float32 products of width-32 vectors, and rotary angles that stay float32 in the float64 model too.
TOLERANCE = {"atol": 2e-5, "rtol": 2e-3}


def loss_of_step(model, batch, vocabulary, target, weights):
    return draft_loss(model, batch, vocabulary, target.lm_head_weight, weights)


def literal_loss(model: DraftModel, rows, anchors, lm_head: torch.Tensor, weights: LossWeights) -> torch.Tensor:
    """The objective as the papers write it, one block at a time."""
    gamma = model.config.block_size
    total, total_weight = 0.0, 0.0
    for row, chosen in zip(rows, anchors, strict=True):
        for t in chosen.tolist():
            k_ctx, v_ctx = model.context_kv(model.project_context(row.features[:t].double()), torch.arange(t))
            ids = torch.tensor([int(row.input_ids[t])] + [model.config.mask_token_id] * (gamma - 1))
            hidden = model.forward_block(
                model.embed(ids),
                torch.arange(t, t + gamma),
                lambda i, q, k, v, sinks, k_ctx=k_ctx, v_ctx=v_ctx: attend_dense(
                    q, torch.cat([k_ctx[i], k]), torch.cat([v_ctx[i], v]), scale=model.config.attention_scale
                ),
            )
            state = model.markov_head.initial_state(1, hidden.device, hidden.dtype)
            losses = []
            for j in range(min(gamma, len(row.input_ids) - 1 - t)):
                bias, w1, state = markov_step(
                    model.markov_head, row.input_ids[t + j : t + j + 1], hidden[j : j + 1], state
                )
                base, label = hidden[j] @ lm_head.T, row.input_ids[t + j + 1]
                listed = base >= base.topk(model.config.selector_top_k or len(base)).values[-1]
                p_draft = torch.softmax((base + bias[0]).where(listed, -math.inf), dim=-1)
                p_target = torch.softmax(row.last_hidden[t + j].double() @ lm_head.T, dim=-1)
                l1 = (p_draft - p_target).abs().sum()
                features = torch.cat([hidden[j], w1[0]]) if model.config.confidence_head_with_markov else hidden[j]
                logit = model.confidence_head.proj(features)[0]
                confidence = F.binary_cross_entropy_with_logits(logit, (1 - l1 / 2).detach())
                ce = -p_draft[label].log() if listed[label] else 0.0
                losses.append(weights.ce * ce + weights.l1 * l1 + weights.confidence * confidence)
                if model.config.selector_top_k:
                    p_base = torch.softmax(base, dim=-1)
                    losses[-1] += weights.ce * -p_base[label].log() + weights.l1 * (p_base - p_target).abs().sum()
            slots = [math.exp(-j / weights.position_decay) for j in range(len(losses))]
            total += sum(weight * loss for weight, loss in zip(slots, losses, strict=True))
            total_weight += sum(slots)
    return total / total_weight


@pytest.mark.parametrize("head", MARKOV_HEAD_TYPES)
def test_loss_and_gradients_equal_the_literal_objective(head, target, rows, config, make_drafter, monkeypatch):
    monkeypatch.setattr(loss_module, "_CHUNK_ROWS", 37)
    # Among 20 of 64 tokens the text's own is not always.
    config = replace(config, markov_head_type=head, confidence_head_with_markov=head != "gated", selector_top_k=20)
    model = make_drafter(config)
    generator = torch.Generator().manual_seed(0)
    anchors = [sample_anchors(row, 5, generator) for row in rows]
    output = loss_of_step(model, collate(rows, anchors, states_of(target, rows), 4), WHOLE, target, WEIGHTS)
    output.loss.backward()
    found = {name: parameter.grad for name, parameter in model.named_parameters()}

    literal = make_drafter(config).double()
    literal.bind_target(target.embed_weight.double(), target.lm_head_weight.double())
    expected = literal_loss(literal, rows, anchors, target.lm_head_weight.double(), WEIGHTS)
    expected.backward()
    torch.testing.assert_close(output.loss.double(), expected, atol=1e-5, rtol=1e-5)
    for name, parameter in literal.named_parameters():
        torch.testing.assert_close(found[name].double(), parameter.grad, **TOLERANCE, msg=lambda m, n=name: f"{n}: {m}")


def test_a_slice_that_holds_every_token_changes_nothing(target, rows, config, make_drafter):
    model = make_drafter(config)
    batch = collate(
        rows, [torch.tensor([row.prompt_len, row.prompt_len + 9]) for row in rows], states_of(target, rows), 4
    )
    whole = loss_of_step(model, batch, WHOLE, target, WEIGHTS)
    every = LossVocabulary(torch.arange(64), 40, 24).draw(torch.Generator(), torch.device("cpu"))
    sliced = loss_of_step(model, batch, every, target, WEIGHTS)
    for name in ("loss", "ce", "l1", "acceptance"):
        torch.testing.assert_close(getattr(sliced, name), getattr(whole, name))


def test_sampled_tokens_stand_for_all_that_are_left_out():
    logits = torch.randn(500, generator=torch.Generator().manual_seed(0))
    vocabulary = LossVocabulary(torch.arange(500), 100, 50)
    generator = torch.Generator().manual_seed(1)
    estimates = []
    for _ in range(400):
        part = vocabulary.draw(generator, torch.device("cpu"))
        assert len(part.ids.unique()) == 150
        assert torch.equal(part.ids[part.index[part.ids]], part.ids)
        assert set(range(400, 500)) <= set(part.ids.tolist())
        estimates.append(torch.exp(part.rows(logits) + part.log_weight).sum())
    # One estimate is off by about 8 %; the mean of 400 by about 0.4 %.
    torch.testing.assert_close(torch.stack(estimates).mean(), logits.exp().sum(), rtol=0.015, atol=0)


def test_labels_outside_the_slice_carry_no_cross_entropy(target, rows, config, make_drafter):
    model = make_drafter(config)
    batch = collate(rows[:1], [torch.tensor([rows[0].prompt_len])], states_of(target, rows[:1]), 4)
    labels = set(batch.labels.flatten().tolist())
    ids = torch.tensor([token for token in range(64) if token not in labels])
    index = torch.full((64,), -1)
    index[ids] = torch.arange(len(ids))
    output = loss_of_step(model, batch, VocabularySlice(ids, torch.zeros(len(ids)), index), target, WEIGHTS)
    assert float(output.ce) == 0.0
    assert torch.isfinite(output.loss)
    output.loss.backward()
    assert all(torch.isfinite(p.grad).all() for p in model.parameters())


def make_row(row_len: int, prompt_len: int) -> StoredText:
    generator = torch.Generator().manual_seed(row_len)
    return StoredText(
        torch.randint(3, 64, (row_len,), generator=generator),
        prompt_len,
        torch.randn(row_len, 64, generator=generator),
        torch.randn(row_len, 32, generator=generator),
    )


def test_anchors_and_their_first_label_are_answer_tokens():
    row = make_row(30, 12)
    generator = torch.Generator().manual_seed(0)
    seen = set()
    for _ in range(50):
        anchors = sample_anchors(row, 5, generator).tolist()
        assert anchors == sorted(set(anchors)) and len(anchors) == 5
        seen |= set(anchors)
    assert seen == set(range(12, 29))


def test_short_answers_give_fewer_anchors():
    assert len(sample_anchors(make_row(14, 12), 5, torch.Generator())) == 1
    assert len(sample_anchors(make_row(13, 12), 5, torch.Generator())) == 0


def test_batch_reads_labels_and_target_states_at_the_right_positions():
    rows = [make_row(20, 8), make_row(11, 6)]
    anchors = [torch.tensor([8, 15, 18]), torch.tensor([9])]
    batch = collate(rows, anchors, states_of(None, rows), 4)
    assert batch.supervised.tolist() == [
        [[True] * 4, [True] * 4, [True, False, False, False]],
        [[True, False, False, False], [False] * 4, [False] * 4],
    ]
    assert torch.equal(batch.labels[0, 1], rows[0].input_ids[16:20])
    # The second block's slots are flat 4 to 7, all of them supervised.
    assert batch.slots.tolist() == [0, 1, 2, 3, 4, 5, 6, 7, 8, 12]
    assert torch.equal(batch.target_hidden[4:8], rows[0].last_hidden[15:19])
    assert int(batch.anchor_ids[1, 0]) == int(rows[1].input_ids[9])
    assert torch.equal(batch.prev_ids[0, 1], rows[0].input_ids[15:19])


def test_kept_states_equal_those_of_a_target_that_runs_in_every_step(target, rows):
    texts = [Text(row.input_ids, row.prompt_len) for row in rows]
    stored, computed = states_of(target, keep_states(target, texts, batch_tokens=40)), states_of(target, texts)
    for i, text in enumerate(texts):
        before_last = slice(len(text.input_ids) - 1)
        for name in ("features", "last_hidden"):
            expected, found = getattr(computed, name)[i, before_last], getattr(stored, name)[i, before_last]
            torch.testing.assert_close(found, expected, atol=2e-4, rtol=2e-4)


def batch(*anchors):
    """Blocks of two slots in a text of eight tokens: the block of anchor 6 ends after a slot."""
    text = StoredText(torch.arange(8), 2, torch.zeros(8, 64), torch.zeros(8, 32))
    return collate([text], [torch.tensor(anchors)], states_of(None, [text]), 2)


def test_the_accept_length_is_the_mean_of_products_over_blocks():
    """Acceptances of a block go together: the product of their means is too low."""
    acceptance = torch.tensor([[[1.0, 1.0], [0.0, 0.5], [0.5, 0.0]]])
    sums = Sums(2, torch.device("cpu"))
    # Two batches, of which the second one weighs three times as much.
    for value, weight in ((0.8, 1.0), (0.4, 3.0)):
        output = LossOutput(*[torch.tensor(value)] * 4, acceptance=acceptance, weight=torch.tensor(weight))
        sums.add(output, batch(2, 3, 6))
    report = sums.report(3, Accelerator(cpu=True), held_out=True)
    assert (report.step, report.held_out) == (3, True)
    assert report.loss == pytest.approx(0.5)
    assert report.acceptance == pytest.approx((0.5, 0.75))
    assert report.tau == pytest.approx(1 + 1.5 / 3 + 1.0 / 2)


def test_a_slot_that_no_block_reaches_accepts_nothing():
    """Held-out answers may all be shorter than a block; what is not a number would stay the best accept length."""
    output = LossOutput(*[torch.tensor(0.5)] * 4, acceptance=torch.tensor([[[0.5, 0.0]]]), weight=torch.tensor(1.0))
    sums = Sums(2, torch.device("cpu"))
    sums.add(output, batch(6))
    report = sums.report(3, Accelerator(cpu=True), held_out=True)
    assert (report.acceptance, report.tau) == ((0.5, 0.0), 1.5)
