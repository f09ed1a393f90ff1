"""Means that a run reports."""

import pytest
import torch
from accelerate import Accelerator
from dspark_training.anchors import collate
from dspark_training.loss import LossOutput
from dspark_training.report import Sums
from dspark_training.texts import StoredText, states_of


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
