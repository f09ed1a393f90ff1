"""What requests are told of their drafts: traces, and counts of SGLang step by step in the meta_info of answers."""

from types import SimpleNamespace

import pytest
import torch
from dspark_kernels import ASKED_ROWS, CACHED_ROWS
from sglang_objects import request

from sglang_dspark.features.reports.traces import count_drafts, trace
from sglang_dspark.step.decision import StepDecision, StepRecord
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


def outputs(*, rounds, drafted, rows, accepted):
    """Return a batch whose second request has these counts; the ``rows`` of its verifications include the anchors."""
    return SimpleNamespace(
        spec_verify_ct=[9, rounds],
        spec_num_block_accept_tokens=[9, drafted],
        spec_num_cap_tokens=[9, rows],
        spec_num_correct_drafts=[9, accepted],
    )


def meta_info(*, rounds, drafted, rows, accepted, **of_sglang):
    """Return the report of such a request."""
    found = dict(of_sglang)
    count_drafts(None, None, found, outputs(rounds=rounds, drafted=drafted, rows=rows, accepted=accepted), 1)
    return found


def test_the_drafts_that_were_verified_count():
    of_sglang = {"spec_accept_rate": 0.1, "spec_num_proposed_drafts": 28}
    found = meta_info(rounds=4, drafted=20, rows=12, accepted=6, **of_sglang)
    assert found["dspark"] == {
        "rounds": 4,
        "drafted_tokens": 20,
        "verified_tokens": 8,
        "accepted_tokens": 6,
        "accept_length": 2.5,
    }
    assert (found["spec_accept_rate"], found["spec_num_proposed_drafts"]) == (0.75, 8)


def test_plain_steps_are_reported_and_verify_nothing():
    found = meta_info(rounds=4, drafted=0, rows=4, accepted=0, spec_accept_rate=0.0)
    assert (found["dspark"]["verified_tokens"], found["spec_accept_rate"]) == (0, 0.0)


def test_a_request_without_a_step_says_nothing():
    assert meta_info(rounds=0, drafted=0, rows=0, accepted=0) == {}
    embeddings = {}
    count_drafts(None, None, embeddings, SimpleNamespace(), 0)
    assert embeddings == {}
