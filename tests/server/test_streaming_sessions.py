"""Streaming sessions keep the K/V of their turns, and every turn's text is that of its whole prompt."""

from __future__ import annotations

import json
import random
from concurrent.futures import ThreadPoolExecutor

import pytest
from golden_server import CASES, call, greedy, policy

TURNS = 4


def dialogue(server, session, seed):
    """Return (whole prompt, text) of each turn; turns end by length, by a stop token, and by the end of a text."""
    rng, ids, turns = random.Random(seed), [], []
    for turn in range(TURNS):
        ids = [*ids, *rng.choice(CASES)["prompt_ids"][: rng.choice((1, 3, 9))]]
        added = ids[len(turns[-1][0]) + len(turns[-1][1]) :] if turns else ids
        stops = {"stop_token_ids": [1, rng.choice(CASES[turn]["output_ids"])]}
        parameters = {"session_params": {"id": session}} if session else {}
        asked = added if session else ids
        body = greedy(asked, rng.choice((1, 5, 13)), stops, **parameters)
        text = server.post_json("/generate", body)["output_ids"]
        turns.append((ids, text))
        ids = [*ids, *text]
    return turns


def in_session(server, seed):
    opened = {"capacity_of_str_len": 10_000, "streaming": True}
    session = json.loads(call(server, "/open_session", body=opened)[1])
    try:
        return dialogue(server, session, seed)
    finally:
        assert call(server, "/close_session", body={"session_id": session})[0] == 200


@pytest.mark.parametrize("name", ["tight", "corner", "scheduled_corner"])
def test_turns_have_the_texts_of_their_whole_prompts(name, plain, request):
    server = request.getfixturevalue(name)
    seeds = range(12)
    with ThreadPoolExecutor(6) as pool:
        expected = list(pool.map(lambda seed: dialogue(plain, None, seed), seeds))
        with policy(server, "static"):
            found = list(pool.map(lambda seed: in_session(server, seed), seeds))
    assert found == expected
    assert call(server, "/flush_cache", body={})[0] == 200
