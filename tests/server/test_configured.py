"""Tests of a server whose options stand in a YAML file, some of which no other server of the tests has.

Sessions, streams and errors are those of a plain server.
"""

from __future__ import annotations

import json
import math
import urllib.error
import urllib.request
from itertools import pairwise

import pytest
from golden_server import (
    CASES,
    PACE_MS,
    PROPOSED,
    call,
    endless,
    events,
    generate,
    greedy,
    in_background,
    output_ids,
    policy,
    refused,
    rounds_of,
    wait_for_running,
)

from sglang_dspark.tools.launch import open_directly

RUNNING = 2
OWN = {"policy": "threshold", "confidence_threshold": 0.6}


def test_the_server_says_how_it_was_configured(configured):
    found = configured.get_json("/dspark/capabilities")
    assert (found["engine"], found["policy"], found["effective_decode_path"]) == ("plugin", "threshold", "dspark")
    assert [found["policies"][name]["available"] for name in ("threshold", "auto")] == [True, False]


def test_the_threshold_of_the_server_cuts_every_block(configured):
    [answer] = generate(configured, [greedy(CASES[2]["prompt_ids"], 64, speculation={"trace": True})], 1)
    assert answer["output_ids"] == CASES[2]["output_ids"]
    for entry in rounds_of(answer):
        sure = [1 / (1 + math.exp(-logit)) >= 0.6 for logit in entry["confidence"]]
        assert entry["verified"] == (sure.index(False) if False in sure else 7)
    assert len({entry["verified"] for entry in rounds_of(answer)}) > 1


def test_temperatures_of_a_file_stay_as_they_are(configured):
    output_ids(configured, [greedy(case["prompt_ids"], 64) for case in CASES[:4]], RUNNING)
    calibration = configured.get_json("/dspark/stats")["calibration"]
    assert calibration["scale"] == [0.5] * 7 and calibration["refits"] == 0
    features = configured.get_json("/dspark/capabilities")["features"]
    assert features["online_calibration"] is False


def test_every_answer_says_whether_the_servers_slo_was_met(configured):
    bodies = [greedy(CASES[0]["prompt_ids"], 32, speculation=asked) for asked in (None, {"tpot_ms": 0.2})]
    slos = [answer["meta_info"]["dspark_slo"] for answer in generate(configured, bodies, RUNNING)]
    assert [(slo["slo_tpot_ms"], slo["outcome"]) for slo in slos] == [(9000.0, "met"), (0.2, "infeasible")]
    assert configured.get_json("/dspark/capabilities")["slo"]["tpot_ms"] == 9000.0
    said = refused(configured, "/generate", {**bodies[1], "speculation": {"tpot_ms": 0.1}})
    assert "speculation.tpot_ms=0.1 is less" in said and "--speculative-dspark-min-tpot-ms=0.2" in said


def test_the_drafter_proposes_what_the_list_has(configured):
    """Texts are the target's own, its weights are rounded, and tokens that are not in the list are counted."""
    drafter = configured.get_json("/dspark/capabilities")["drafter"]
    assert (drafter["vocab_size"], drafter["quantization"]) == (len(PROPOSED), "int8")
    before = configured.get_json("/dspark/stats")["unproposed_tokens"]
    bodies = [greedy(case["prompt_ids"], 64, speculation={"trace": True, "preset": "none"}) for case in CASES[:4]]
    answers = generate(configured, bodies, RUNNING)
    assert [answer["output_ids"] for answer in answers] == [case["output_ids"] for case in CASES[:4]]
    assert {token for answer in answers for entry in rounds_of(answer) for token in entry["draft"]} <= {*PROPOSED}
    counted = configured.get_json("/dspark/stats")["unproposed_tokens"] - before
    missing = [token for answer in answers for token in answer["output_ids"][1:] if token not in PROPOSED]
    # A step may commit a token after the end of its text.
    assert 0 < len(missing) <= counted <= len(missing) + 4


def test_chunks_come_at_the_interval_of_the_server(configured):
    """A chunk ends with the step that completes the interval, of eight tokens at most."""
    chunks = events(configured, "/generate", endless(CASES[0]["prompt_ids"], 65))
    lengths = [chunk["meta_info"]["completion_tokens"] for chunk in chunks]
    assert lengths[-1] == 65 and len(lengths) <= 10
    assert all(later - earlier >= 8 for earlier, later in pairwise(lengths[:-1]))


def test_a_request_of_higher_priority_goes_first(configured, plain):
    """It takes the place of one that runs, whose text goes on as if nothing had been."""
    long = [endless([5 + i, 9, 7], 300, priority=0) for i in range(RUNNING)]
    waiting, urgent = endless([20, 9, 7], 30, priority=1), endless([21, 9, 7], 30, priority=100)
    ended: list[int] = []
    answers = {}

    def ask(number, body):
        answers[number] = configured.post_json("/generate", body)
        ended.append(number)

    bodies = [*long, waiting, urgent]
    threads = []
    with policy(configured, "off", OWN, pace_ms=PACE_MS):
        for number, body in enumerate(bodies):
            threads.append(in_background(lambda number=number, body=body: ask(number, body)))
            if number == RUNNING - 1:
                wait_for_running(configured, RUNNING)
        threads[3].join()
        assert ended == [3]
    for thread in threads:
        thread.join()
    assert sum(answer["meta_info"]["num_retractions"] for answer in answers.values()) > 0
    unranked = [{**body, "priority": None} for body in bodies]
    assert [answers[number]["output_ids"] for number in range(4)] == output_ids(plain, unranked, 4)


def turns(server, stops):
    """Return the texts of a session.

    Two turns are appended to the first one, a third starts from the first again, and the last one adds no token.
    """
    session = json.loads(call(server, "/open_session", body={"capacity_of_str_len": 10_000})[1])
    texts, rids = [], []
    added = [*(case["prompt_ids"] for case in CASES[:4]), []]
    for prompt, stop, parent in zip(added, stops, (None, 0, 1, 0, 3), strict=True):
        params = {"id": session, "rid": None if parent is None else rids[parent]}
        body = greedy(prompt, 24, {"stop_token_ids": [stop]}, session_params=params)
        answer = server.post_json("/generate", body)
        texts.append(answer["output_ids"])
        rids.append(answer["meta_info"]["id"])
    assert call(server, "/close_session", body={"session_id": session})[0] == 200
    return texts


def test_a_session_continues_what_was_shown(plain, dspark):
    """Each turn ends at a token in the middle of a text, with drafts after it accepted already."""
    stops = [case["output_ids"][10] for case in CASES[:2]] + [1, 1, 1]
    expected = turns(plain, stops)
    assert len(expected[0]) < 24  # the stop counted
    assert all(expected)
    with policy(dspark, "static"):
        assert turns(dspark, stops) == expected


def test_a_turn_may_replace_others(dspark):
    """All of them, or those from a named one on, of which two may have one name. A plain server ends."""
    session = json.loads(call(dspark, "/open_session", body={"capacity_of_str_len": 10_000})[1])
    turns = [{}, {"rid": "a"}, {"rid": "a"}, {"rid": "a", "replace": True}, {"replace": True}, {"rid": None}]
    for number, params in enumerate(turns):
        body = greedy(CASES[0]["prompt_ids"], 8, session_params={"id": session, **params}, rid="ab"[0 < number < 3])
        answer = dspark.post_json("/generate", body)
    assert answer["output_ids"] == CASES[0]["output_ids"][:8]


def streamed(server, interval):
    """Return the length of the text in every message of its stream."""
    answers = events(server, "/generate", greedy(CASES[0]["prompt_ids"], 64, {"stream_interval": interval}))
    return [answer["meta_info"]["completion_tokens"] for answer in answers]


def densest_stream(server, interval):
    """Return the stream whose largest gap is smallest, of up to eight: a busy front end skips the earlier of two."""

    def largest_gap(lengths):
        return max(after - before for before, after in pairwise(lengths))

    streams = []
    for _ in range(8):
        streams.append(streamed(server, interval))
        if largest_gap(streams[-1]) == interval:
            break
    return min(streams, key=largest_gap)


def test_a_stream_arrives_as_often_as_without_speculation(plain, dspark):
    interval = 8
    without = densest_stream(plain, interval)
    assert len(without) > 1 and {*without} <= {*range(1, 64, interval), 64}
    with policy(dspark, "static", pace_ms=PACE_MS):
        lengths = densest_stream(dspark, interval)
    assert (lengths[0], lengths[-1]) == (1, 64)
    gaps = [after - before for before, after in pairwise(lengths)]
    # At the end of the step that brought the token, of eight at most.
    assert all(interval <= gap < interval + 8 for gap in gaps[:-1]), lengths
    assert gaps[-1] < interval + 8, lengths


def test_errors_can_be_read_by_a_page_of_another_site(dspark):
    headers = {"Content-Type": "application/json", "Origin": "http://elsewhere.example"}
    body = b'{"text": "a", "speculation": {"max_verify": -1}}'
    with pytest.raises(urllib.error.HTTPError) as caught:
        open_directly(urllib.request.Request(dspark.url + "/generate", body, headers), timeout=60)
    assert caught.value.code == 400
    assert caught.value.headers["Access-Control-Allow-Origin"]
