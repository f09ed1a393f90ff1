"""Tests of streams within letters, and of streaming sessions, whose turns have the texts of their whole prompts."""

from __future__ import annotations

import json
import random
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import pytest
from golden_server import (
    CASES,
    PACE_MS,
    VOCAB,
    assert_pool_is_whole,
    call,
    counting,
    endless,
    events,
    generate,
    greedy,
    in_background,
    policy,
    refused,
    wait_for_running,
)

LIKELY = (33, 21, 3, 39, 29, 7, 13)
NUM_TOKENS = 60


def prompts(number):
    rng = random.Random(5)
    return [case["prompt_ids"] for case in CASES] + [rng.choices(LIKELY, k=17) for _ in range(number - len(CASES))]


def completion(ids):
    return {"model": "m", "prompt": ids, "temperature": 0, "max_tokens": NUM_TOKENS, "ignore_eos": True}


def chat(ids):
    messages = [{"role": "user", "content": "as in input_ids"}]
    return {"messages": messages, "input_ids": ids} | {k: v for k, v in completion(ids).items() if k != "prompt"}


def said(message):
    return (message.get("reasoning_content") or "") + (message.get("content") or "")


ROUTES = {
    "/generate": (lambda ids: endless(ids, NUM_TOKENS), lambda answer: answer["text"]),
    "/v1/completions": (completion, lambda answer: "".join(choice["text"] for choice in answer["choices"])),
    "/v1/chat/completions": (
        chat,
        lambda answer: "".join(said(choice.get("delta") or choice.get("message")) for choice in answer["choices"]),
    ),
}


@pytest.mark.parametrize(
    ("name", "route"),
    [
        *(("corner", route) for route in ROUTES),
        ("scheduled", "/generate"),
        pytest.param("scheduled", "/v1/completions", marks=pytest.mark.thorough),
        pytest.param("scheduled", "/v1/chat/completions", marks=pytest.mark.thorough),
    ],
)
@pytest.mark.slow
def test_streams_are_the_text(name, route, request):
    """It holds for our worker and SGLang's; without parsers and with; on ``/generate`` new text and all of it."""
    server = request.getfixturevalue(name)
    body_of, text_of = ROUTES[route]

    def both(ids):
        pieces = [text_of(event) for event in events(server, route, body_of(ids))]
        text = pieces[-1] if name == "scheduled" and route == "/generate" else "".join(pieces)
        return text, text_of(server.post_json(route, body_of(ids)))

    with policy(server, "static"), ThreadPoolExecutor(4) as pool:
        found = list(pool.map(both, prompts(8)))
    assert [text for text, _ in found] == [text for _, text in found]
    assert any("界" in text for text, _ in found)


@pytest.mark.slow
def test_a_prompt_that_is_only_scored_has_no_log_probability_of_a_token(corner, plain):
    asked = {"return_logprob": True, "top_logprobs_num": 2, "token_ids_logprob": [5], "logprob_start_len": 0}
    body = endless(CASES[0]["prompt_ids"], 0, **asked)
    ours, theirs = (server.post_json("/generate", body) for server in (corner, plain))
    assert ours["output_ids"] == theirs["output_ids"] == []
    for name in ("output_token_logprobs", "output_token_logprobs_length"):
        assert ours["meta_info"][name] == theirs["meta_info"][name] == ([] if name.endswith("s") else 0)
    for name in ("input_token_logprobs", "output_top_logprobs", "output_token_ids_logprobs"):
        assert len(ours["meta_info"][name]) == len(theirs["meta_info"][name]) > 0


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


@contextmanager
def opened(server):
    """Yield a session that is open inside the block."""
    session = json.loads(call(server, "/open_session", body={"capacity_of_str_len": 10_000, "streaming": True})[1])
    try:
        yield session
    finally:
        assert call(server, "/close_session", body={"session_id": session})[0] == 200


def in_session(server, seed):
    with opened(server) as session:
        return dialogue(server, session, seed)


@pytest.mark.parametrize(
    "name",
    [
        "corner",
        pytest.param("tight", marks=pytest.mark.thorough),
        pytest.param("scheduled_corner", marks=pytest.mark.thorough),
    ],
)
def test_turns_have_the_texts_of_their_whole_prompts(name, plain, request):
    server = request.getfixturevalue(name)
    seeds = range(8)
    with ThreadPoolExecutor(6) as pool:
        expected = list(pool.map(lambda seed: dialogue(plain, None, seed), seeds))
        with policy(server, "static"):
            found = list(pool.map(lambda seed: in_session(server, seed), seeds))
    assert found == expected
    server.flush_cache()  # nothing of a session is left


def test_turns_during_a_running_one_are_refused(corner, plain):
    prompt = CASES[0]["prompt_ids"]
    with opened(corner) as session:
        answers = []
        body = endless(prompt, 100, session_params={"id": session})
        with policy(corner, "off", pace_ms=PACE_MS):
            turn = in_background(lambda: answers.append(corner.post_json("/generate", body)["output_ids"]))
            wait_for_running(corner, 1)
            for _ in range(3):
                said = refused(corner, "/generate", endless([5], 2, session_params={"id": session}))
                assert "active request" in said
        turn.join()
        text = corner.post_json("/generate", endless([5], 9, session_params={"id": session}))["output_ids"]
    [expected] = generate(plain, [endless([*prompt, *answers[0], 5], 9)], 1)
    assert (len(answers[0]), text) == (100, expected["output_ids"])


REFUSED: dict[str, list[dict[str, Any]]] = {
    "streaming": [
        {"session_params": {"replace": True}},
        {"session_params": {"replace": True, "rid": "0"}},
        {"session_params": {"drop_previous_output": True}},
        {"session_params": {"offset": 3}},
    ],
    "not streaming": [
        {"session_params": {"rid": "another"}},
        {"session_params": {"replace": True, "rid": "another"}},
        {"session_params": {"replace": True}, "input_ids": []},
    ],
    "both": [
        {"session_params": {"id": "another"}},
        {"input_ids": [5] * 4000},
        {"input_ids": [5] * 4000, "session_params": {"replace": True}},
        {"sampling_params": {"regex": "("}},
        {"speculation": {"max_verify": -1}, "session_params": {"replace": True}},
        {"speculation": {"cache": "key"}},
    ],
}


def turns(server, kind, *, with_others):
    """Return what the turns of a session are answered, and how much of them was cached; before each comes another turn.

    Args:
        with_others: whether the others are sent, and refused.
    """
    server.flush_cache()
    opening = {"capacity_of_str_len": 10_000, "streaming": kind == "streaming"}
    session, found = json.loads(call(server, "/open_session", body=opening)[1]), []
    for number, other in enumerate([{}, *REFUSED[kind], *REFUSED["both"]]):
        # Of the other kind, a turn says which one it follows.
        follows = {"id": session} | ({"rid": str(number - 1)} if number and kind != "streaming" else {})
        if with_others and other:
            named = {"id": session} if "replace" in other.get("session_params", {}) else follows
            body = {**endless([5], 2), **other, "session_params": {**named, **other.get("session_params", {})}}
            with counting(server) as grown:
                assert refused(server, "/generate", body), other
            assert not any(grown.values()), other
        answer = server.post_json("/generate", endless([6, 7], 5, rid=str(number), session_params=follows))
        found.append((answer["output_ids"], answer["meta_info"]["cached_tokens"]))
    assert call(server, "/close_session", body={"session_id": session})[0] == 200
    return found


@pytest.mark.parametrize("kind", ["streaming", "not streaming"])
def test_a_refused_turn_leaves_everything_as_it_was(kind, corner):
    assert turns(corner, kind, with_others=True) == turns(corner, kind, with_others=False)
    assert_pool_is_whole(corner)


def test_a_retracted_turn_stays_in_its_session(tight, plain):
    def turns(seed):
        ids, retracted, draw = [], 0, random.Random(seed)
        with opened(tight) as session:
            for _ in range(3):
                added = draw.choices(VOCAB, k=12)
                answer = tight.post_json("/generate", endless(added, 20, session_params={"id": session}))
                [whole] = generate(plain, [endless([*ids, *added], 20)], 1)
                assert answer["output_ids"] == whole["output_ids"]
                ids += [*added, *answer["output_ids"]]
                retracted += answer["meta_info"]["num_retractions"]
        return retracted

    others = [greedy(random.Random(seed).choices(VOCAB, k=4), 110) for seed in range(36)]
    with ThreadPoolExecutor(3) as pool, policy(tight, "random", pace_ms=PACE_MS / 4):
        crowd = in_background(lambda: generate(tight, others, 12))
        wait_for_running(tight, 3)
        assert sum(pool.map(turns, range(6))) > 0
        crowd.join()
