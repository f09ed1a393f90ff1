"""Memory that is given away and taken back while requests come."""

import threading
import time

import pytest
from golden_server import (
    CASES,
    DRAFTER_ALONE,
    PACE_MS,
    call,
    endless,
    generate,
    in_background,
    policy,
    wait_for_running,
)

PROMPTS = [case["prompt_ids"] for case in CASES[:3]]


def rounds(answers):
    """Return the texts, and what was drafted for them and accepted."""
    traces = [[entry for entry in answer["meta_info"]["dspark_trace"] if entry is not None] for answer in answers]
    told = [[(entry["start"], entry["draft"], entry["accepted"]) for entry in trace] for trace in traces]
    return [(answer["output_ids"], trace) for answer, trace in zip(answers, told, strict=True)]


def asleep(server, asked, *steps):
    """Return the answers to requests that come while memory is away: they come after the last of these steps."""
    answers = []
    came = threading.Thread(target=lambda: answers.extend(generate(server, asked, 4)))
    came.start()
    for path, body in steps:
        time.sleep(0.3)
        assert answers == []
        assert call(server, path, body=body)[0] == 200
    came.join()
    return answers


def test_a_server_sleeps_and_wakes(dspark):
    """Nothing is given away without ``--enable-memory-saver``; a plain server would answer all the while."""
    with policy(dspark, "static"):
        assert_sleeps_and_wakes(dspark)


@pytest.mark.thorough
def test_what_was_away_comes_back(saving):
    """Eager steps of a drafter whose weights and K/V were overwritten, all but what the host keeps.

    Its weights are random: those of a file are no allocation on a CPU.
    """
    with policy(saving, "static"):
        assert_sleeps_and_wakes(saving)


@pytest.mark.thorough
def test_captured_steps_find_what_was_away(graphs_saving):
    with policy(graphs_saving, "static"):
        assert_sleeps_and_wakes(graphs_saving, tokens=5)


def assert_sleeps_and_wakes(server, tokens=20):
    asked = [endless(prompt, tokens, speculation=DRAFTER_ALONE) for prompt in PROMPTS]
    before = rounds(generate(server, asked, 3))
    assert call(server, "/release_memory_occupation", body={"tags": ["kv_cache", "weights"]})[0] == 200
    assert call(server, "/release_memory_occupation", body={})[0] == 200  # what is left
    answers = asleep(
        server,
        asked,
        ("/resume_memory_occupation", {"tags": ["weights"]}),
        ("/continue_generation", {}),
        ("/resume_memory_occupation", {"tags": ["kv_cache", "cuda_graph"]}),
    )
    assert rounds(answers) == before
    assert call(server, "/resume_memory_occupation", body={})[0] == 200  # nothing is away


def test_running_requests_keep_the_memory(dspark):
    """A plain server would end, and also over the tag."""
    answers = []
    with policy(dspark, "off", pace_ms=PACE_MS):
        running = in_background(lambda: answers.extend(generate(dspark, [endless([5, 6, 7], 900)], 1)))
        wait_for_running(dspark, 1)
        status, said = call(dspark, "/release_memory_occupation", body={})
    running.join()
    assert status == 400 and "requests are running" in said and len(answers[0]["output_ids"]) == 900
    for path in ("release", "resume"):
        status, said = call(dspark, f"/{path}_memory_occupation", body={"tags": ["hope"]})
        assert status == 400 and "tags=['hope']" in said and "kv_cache, weights, cuda_graph" in said


def test_memory_is_released_right_behind_requests(dspark):
    """Requests that were aborted end in the step that is under way."""
    with policy(dspark, "static", pace_ms=PACE_MS):
        for _ in range(4):
            answers = []
            running = in_background(lambda into=answers: into.extend(generate(dspark, [endless([5, 6, 7], 900)], 1)))
            wait_for_running(dspark, 1)
            call(dspark, "/abort_request", body={"abort_all": True})
            assert call(dspark, "/release_memory_occupation", body={})[0] == 200
            assert call(dspark, "/resume_memory_occupation", body={})[0] == 200
            running.join()
            assert answers[0]["meta_info"]["finish_reason"]["type"] == "abort"
