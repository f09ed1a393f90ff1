"""Tokens that the drafter cannot propose are counted, and the log says once that they are many."""

import numpy as np
import pytest
import torch

from sglang_dspark.features.reports.coverage import SPAN, Coverage
from sglang_dspark.step.decision import StepDecision
from sglang_dspark.step.record import StepRecord
from sglang_dspark.step.selection import FixedLength

ENGLISH, FRENCH = range(50), range(50, 100)
PROPOSED = np.arange(101) // 50 != 1  # the last one is for -1


def step(*committed):
    """Return the record of a step that committed these tokens."""
    bs = len(committed)
    record = StepRecord(list("abcd"[:bs]), StepDecision(3, FixedLength()), [3] * bs, torch.full((bs,), 3), None, None)
    return record.of([record.verify_lens, None, None, None, None], torch.tensor(committed))


def test_tokens_of_running_requests_are_counted():
    coverage = Coverage(PROPOSED)
    # The second request has ended; -1 is behind the tokens of the others.
    assert coverage.missing(step([3, 60, 70, -1], [80, 81, 82, 83], [90, -1, -1, -1], [49, 0, -1, -1]), [0, 2, 3]) == 3
    assert Coverage(None).missing(step([60]), [0]) == 0


@pytest.mark.parametrize(("spoken", "warnings"), [(ENGLISH, 0), (FRENCH, 1)])
def test_a_change_of_language_is_named_once(caplog, spoken, warnings):
    coverage = Coverage(PROPOSED)
    for tokens in (ENGLISH, spoken, spoken):
        for start in range(0, SPAN, 4):
            coverage.missing(step([tokens[(start + place) % 50] for place in range(4)]), [0])
    found = [record.message for record in caplog.records]
    assert len(found) == warnings
    assert all("proposes 50 of 100 tokens, which are 0.0 % of the last 4096" in message for message in found)
    assert all("--speculative-dspark-draft-vocabulary" in message for message in found)
