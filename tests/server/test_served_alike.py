"""Sessions, streams and errors are those of a plain server, though steps bring several tokens."""

from __future__ import annotations

import json
import urllib.error
import urllib.request
from itertools import pairwise

import pytest
from golden_server import CASES, PACE_MS, call, greedy, policy

from sglang_dspark.tools.launch import open_directly


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
    """Each turn ends at a token in the middle of a text, with drafts behind it accepted already."""
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
    body = greedy(CASES[0]["prompt_ids"], 64, {"stream_interval": interval}, stream=True)
    lines = call(server, "/generate", body=body)[1].split("\n\n")
    answers = [json.loads(line.removeprefix("data: ")) for line in lines if line.startswith("data: {")]
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
