"""Drafts of a request, counted step by step and attached to it when it has ended."""

from types import SimpleNamespace

import pytest

from sglang_dspark.engine.scheduler.request_counts import attach, count


def request(steps):
    """One whose ``steps`` SGLang has counted."""
    return SimpleNamespace(
        spec_verify_ct=steps,
        spec_correct_drafts_histogram=[2, 1],
        reasoning_tokens=0,
        output_ids_through_stop=[5] * steps,
    )


def rounds(drafted, verified):
    return SimpleNamespace(drafted=drafted, verified=verified)


def attached(req):
    attach(None, None, req)
    return req.spec_correct_drafts_histogram


def test_drafted_and_verified_are_added_up_for_those_that_run():
    first, second = request(3), request(2)
    count([first, second], rounds([5, 5], [3, 0]), [0, 1])
    count([first, second], rounds([5, 5], [0, 0]), [0])  # drafted, and none of it verified
    count([first, second], rounds([0, 0], [2, 1]), [0, 1])  # drafts that a preset has copied
    assert attached(first) == [2, 1, -1 - 10, -1 - 5]
    assert attached(second) == [2, 1, -1 - 5, -1 - 1]


def test_plain_steps_add_nothing_and_are_reported():
    req = request(4)
    count([req], rounds([0], [0]), [0])
    assert attached(req) == [2, 1, -1, -1]


def test_a_request_without_a_step_says_nothing():
    assert attached(request(0)) == [2, 1]


@pytest.mark.parametrize(("counted", "expected"), [(3, 3), (4, 4), (9, 4)])
def test_reasoning_has_at_most_the_tokens_of_the_text(counted, expected):
    req = request(4)
    req.reasoning_tokens = counted
    attach(None, None, req)
    assert req.reasoning_tokens == expected
