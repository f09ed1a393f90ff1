"""SGLang reports accepted drafts over those that were verified."""

from types import SimpleNamespace

import pytest

from sglang_dspark.features.reports import served
from sglang_dspark.features.reports.served import report_verified

BLOCK = 7


class Reporter(SimpleNamespace):
    """Divides by whole blocks, in every second call, and starts again, as SGLang's does."""

    def report(self, *, is_due):
        if is_due:
            self.said.append(self.spec_num_correct_drafts / (self.spec_num_forward_ct * BLOCK))
            self.spec_num_correct_drafts = self.spec_num_forward_ct = self.spec_num_cap_tokens = 0


def add(reporter, verified, accepted):
    reporter.spec_num_correct_drafts += accepted
    reporter.spec_num_forward_ct += 1
    reporter.spec_num_cap_tokens += verified + 1


@pytest.fixture
def said(monkeypatch):
    """Return what a reporter says of steps [(verified, accepted), ...], reported after each; the last two are due."""
    monkeypatch.setattr(served, "tokens_per_step", lambda: BLOCK + 1)

    def said(first, second):
        reporter = Reporter(said=[], spec_num_correct_drafts=0, spec_num_forward_ct=0, spec_num_cap_tokens=0)
        for steps in (first, second):
            for number, step in enumerate(steps, start=1):
                add(reporter, *step)
                report_verified(Reporter.report, reporter, is_due=number == len(steps))
        return reporter.said

    return said


def test_accepted_drafts_are_divided_by_the_verified_ones(said):
    assert said([(2, 1), (5, 2), (1, 1)], [(7, 7), (7, 0)]) == pytest.approx([4 / 8, 7 / 14])


def test_nothing_is_accepted_of_nothing(said):
    assert said([(0, 0), (0, 0)], [(0, 0), (3, 2)]) == pytest.approx([0.0, 2 / 3])
