"""What a run says of itself."""

import json
import sys
from types import SimpleNamespace

import pytest
import torch
from dspark_training import reports
from dspark_training.loss import LossOutput
from dspark_training.parallel import Processes
from dspark_training.report import Log, StepReport, Sums

REPORT = StepReport(8, 1.5, 1.0, 0.5, 0.25, (0.75, 0.5), 2.125, 3.0)


def test_the_accept_length_is_the_mean_of_products_over_blocks():
    """Acceptances of a block go together: the product of their means is too low. The second block ends after a slot."""
    acceptance = torch.tensor([[[1.0, 1.0], [0.5, 0.0], [0.0, 0.5]]])
    supervised = torch.tensor([[[True, True], [True, False], [True, True]]])
    sums = Sums(2, torch.device("cpu"))
    sums.add_step(4.0)
    quarter = torch.tensor(0.25)
    # Two pieces of one step, whose means each give their share of.
    for _ in range(2):
        output = LossOutput(quarter, quarter, quarter, quarter, acceptance)
        sums.add_piece(output, SimpleNamespace(supervised=supervised), 4.0)
    report = sums.report(3, 1.0, Processes(), held_out=True)
    assert (report.loss, report.step, report.held_out) == (0.5, 3, True)
    assert report.acceptance == pytest.approx((0.5, 0.75))
    assert report.tau == pytest.approx(1 + 1.5 / 3 + 1.0 / 2)


def test_a_slot_that_no_block_reaches_accepts_nothing():
    """Held-out answers may all be shorter than a block; what is not a number would stay the best accept length."""
    output = LossOutput(*[torch.tensor(0.5)] * 4, acceptance=torch.tensor([[[0.5, 0.0]]]))
    sums = Sums(2, torch.device("cpu"))
    sums.add_step(1.0)
    sums.add_piece(output, SimpleNamespace(supervised=torch.tensor([[[True, False]]])), 1.0)
    report = sums.report(3, 1.0, Processes(), held_out=True)
    assert (report.acceptance, report.tau) == ((0.5, 0.0), 1.5)


def test_the_log_has_a_line_per_report(tmp_path, monkeypatch):
    monkeypatch.setattr(reports, "has_tensorboard", lambda: False)
    log = Log(tmp_path / "run", 0)
    log.write(REPORT)
    log.write(REPORT)
    lines = [json.loads(line) for line in (tmp_path / "run" / "log.jsonl").read_text().splitlines()]
    assert len(lines) == 2 and lines[0]["acceptance"] == [0.75, 0.5]
    assert not (tmp_path / "run" / "tensorboard").exists()


def test_curves_go_to_tensorboard_where_it_is_installed(tmp_path, monkeypatch):
    """With a stand-in for the package, which SGLang does not bring."""
    points = {}

    class SummaryWriter:
        def __init__(self, folder, *, purge_step):
            assert folder == str(tmp_path / "tensorboard")
            # The run goes on after step 6: what it had drawn of step 7 and later is hidden.
            assert purge_step == 7

        def add_scalar(self, name, value, step):
            points[name] = (step, value)

        def flush(self):
            points["flushed"] = True

    monkeypatch.setattr(reports, "has_tensorboard", lambda: True)
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", SimpleNamespace(SummaryWriter=SummaryWriter))
    Log(tmp_path, 6).write(REPORT)
    assert points["training/tau"] == (8, 2.125)
    assert points["training_acceptance/2"] == (8, 0.5)
    assert points["flushed"]
