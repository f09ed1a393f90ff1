"""SGLang reports accepted drafts over those that were verified."""

from types import SimpleNamespace

import pytest
from sglang_objects import partly

from sglang_dspark.features import reports
from sglang_dspark.features.reports import Reports, report_verified
from sglang_dspark.worker.worker import DSparkWorker

BLOCK, KEPT = 7, 4 + 3


class Reporter(SimpleNamespace):
    """Divides by whole blocks, in every second call, and starts again, as SGLang's does."""

    def report(self, *, is_due, num_generated_tokens):
        assert num_generated_tokens == KEPT
        if is_due:
            assert self.num_generated_tokens == self.steps * KEPT
            self.said.append(self.spec_num_correct_drafts / (self.spec_num_forward_ct * BLOCK))
            self.spec_num_correct_drafts = self.spec_num_forward_ct = self.spec_num_cap_tokens = 0


def add(reporter, verified, accepted):
    reporter.spec_num_correct_drafts += accepted
    reporter.spec_num_forward_ct += 1
    reporter.spec_num_cap_tokens += verified + 1
    reporter.num_generated_tokens += accepted + 1
    reporter.steps += 1


@pytest.fixture
def said(monkeypatch):
    """Return what a reporter says of steps [(verified, accepted), ...], reported after each; the last two are due."""
    monkeypatch.setattr(reports, "tokens_per_step", lambda: BLOCK + 1)
    requests = [SimpleNamespace(output_ids=[7] * 9, finished_len=end) for end in (None, 8, 4)]
    part = partly(Reports, _taking=[(req, 5) for req in requests])  # the last one's end lies before the step
    scheduler = SimpleNamespace(draft_worker=partly(DSparkWorker, parts=[part]))

    def said(first, second):
        counts = "steps num_generated_tokens spec_num_correct_drafts spec_num_forward_ct spec_num_cap_tokens"
        reporter = Reporter(said=[], scheduler=scheduler, **dict.fromkeys(counts.split(), 0))
        for steps in (first, second):
            for number, step in enumerate(steps, start=1):
                add(reporter, *step)
                generated = step[1] + 1
                report_verified(Reporter.report, reporter, is_due=number == len(steps), num_generated_tokens=generated)
        return reporter.said

    return said


def test_accepted_drafts_are_divided_by_the_verified_ones(said):
    assert said([(2, 1), (5, 2), (1, 1)], [(7, 7), (7, 0)]) == pytest.approx([4 / 8, 7 / 14])


def test_nothing_is_accepted_of_nothing(said):
    assert said([(0, 0), (0, 0)], [(0, 0), (3, 2)]) == pytest.approx([0.0, 2 / 3])
