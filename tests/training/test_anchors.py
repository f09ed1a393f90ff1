"""Batches of anchors, the states that they read, and the means that a run reports."""

import pytest
import torch
from accelerate import Accelerator
from dspark_training.anchors import collate, sample_anchors
from dspark_training.loss import LossOutput
from dspark_training.report import Sums
from dspark_training.texts import StoredText, Text, keep_states, states_of


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
