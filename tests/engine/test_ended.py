"""Requests that have ended are no reason to refuse new weights."""

from collections import deque
from types import SimpleNamespace

import pytest
from sglang.srt.managers.schedule_batch import FINISH_ABORT, FINISH_LENGTH
from sglang_objects import batch, request

from sglang_dspark.engine.scheduler import take_out_ended
from sglang_dspark.features.short_prompts import RidingResult


def made(state):
    req = request()
    req.finished_reason = FINISH_LENGTH(1) if state == "ended" else None
    req.to_finish = FINISH_ABORT() if state == "aborted" else None
    return req


def end_aborted(of_step, result):
    for req in of_step.reqs:
        req.finished_reason, req.to_finish = req.finished_reason or req.to_finish, None


def test_requests_that_ran_beside_prompts_are_known_to_end():
    running = batch(made("aborted"), model_config=SimpleNamespace(is_encoder_decoder=False), batch_is_full=True)
    result = RidingResult(running=(batch(*running.reqs), "result"))
    scheduler = SimpleNamespace(
        running_batch=running,
        last_batch=None,
        enable_overlap=True,
        chunked_req=None,
        process_batch_result=lambda of_prompts, riding: end_aborted(*riding.running),
        result_queue=deque([(batch(), result)]),
    )
    take_out_ended(scheduler)
    assert (running.reqs, len(scheduler.result_queue)) == ([], 0)


@pytest.mark.parametrize(
    ("states", "overlap", "chunked", "taken"),
    [
        (["ended"], True, False, True),
        (["ended", "aborted"], True, False, True),
        (["ended"], False, False, True),
        (["ended", "aborted"], False, False, False),  # the step that ends it is still to come
        (["ended", "running"], True, False, False),
        (["ended"], True, True, False),  # a prompt that is encoded in part
    ],
)
def test_requests_that_have_ended_are_taken_out(states, overlap, chunked, taken):
    running = batch(*map(made, states), model_config=SimpleNamespace(is_encoder_decoder=False), batch_is_full=True)
    queue = deque([(batch(*running.reqs), "result")]) if overlap else None
    scheduler = SimpleNamespace(
        running_batch=running,
        last_batch=running,
        enable_overlap=overlap,
        chunked_req=request() if chunked else None,
        process_batch_result=end_aborted,
        **({"result_queue": queue} if overlap else {}),
    )
    take_out_ended(scheduler)
    assert (running.reqs == [], scheduler.last_batch is None, running.batch_is_full) == (taken, taken, not taken)
    assert not overlap or len(queue) == (0 if taken else 1)
