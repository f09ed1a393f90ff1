"""A trace tells a request of its drafts."""

import pytest
import torch
from dspark_kernels import ASKED_ROWS, CACHED_ROWS
from sglang_objects import request

from sglang_dspark.features.reports.traces import trace
from sglang_dspark.step.decision import StepDecision
from sglang_dspark.step.record import StepRecord
from sglang_dspark.step.selection import FixedLength


@pytest.mark.parametrize(("row", "shown"), [(CACHED_ROWS, [4, None, None]), (0, [4, 8, 9]), (ASKED_ROWS, [4, 8, 9])])
def test_a_trace_shows_no_draft_of_an_earlier_answer(row, shown):
    """The last two of three stand behind the drafter's block, and are the chain's, which the block has not followed."""
    record = StepRecord(
        requests=["r"],
        decision=StepDecision(3, FixedLength()),
        drafted=[3],
        verify_lens=torch.tensor([0]),
        confidence=None,
        traced=torch.tensor([[5, 1, 4, 8, 9]]),
        chains=torch.tensor([[row + 3, 0, 7, 8, 9]]),
        num_drawn=1,
    )
    req = request([1], custom_params={"dspark": '{"core": {"trace": true}}'})
    trace([req], record, [0], [0])
    assert req.customized_info["dspark_trace"][-1]["draft"] == shown
