"""Greedy text through a real server: the golden traces, and identity with the target alone in every corner."""

from __future__ import annotations

import http.client
import json
from typing import Any

from golden_server import (
    CASES,
    DRAFTER_ALONE,
    PACE_MS,
    assert_golden_traces,
    assert_pool_is_whole,
    endless,
    generate,
    greedy,
    in_background,
    mixed_bodies,
    output_ids,
    policy,
    prompts,
    rounds_of,
    wait_for_tokens,
    with_options,
)

POLICIES: list[dict[str, Any]] = [
    {"name": "auto"},
    {"name": "random"},
    {"name": "early-stop"},
    {"name": "threshold", "confidence_threshold": 0.6},
    {"name": "static", "verify_len": 1},
    {"name": "off"},
]


def test_golden_traces(dspark):
    """Drafts, verified and accepted counts, and text of every golden case."""
    assert_golden_traces(dspark)


def drafts_behind(server, ids, number):
    """Return the first rounds behind a prompt under ``static``, and how many of its tokens were cached."""
    with policy(server, "static"):
        [answer] = generate(server, [endless(ids, 8 * number, speculation=DRAFTER_ALONE)], 1)
    rounds = [(entry["start"], entry["draft"], entry["accepted"]) for entry in rounds_of(answer)]
    return rounds[:number], answer["meta_info"]["cached_tokens"]


def test_drafts_behind_plain_steps(dspark):
    """Of a text while which the policy changes, and behind a cached one: those behind a prompt of the same tokens."""
    answers: list[dict[str, Any]] = []
    body = endless(CASES[0]["prompt_ids"], 300, speculation=DRAFTER_ALONE)
    with policy(dspark, "off", pace_ms=PACE_MS):
        before = dspark.get_json("/dspark/stats")
        thread = in_background(lambda: answers.extend(generate(dspark, [body], 1)))
        wait_for_tokens(dspark, before, 20)
        with policy(dspark, "static"):
            thread.join()
    text = CASES[0]["prompt_ids"] + answers[0]["output_ids"]
    behind = [entry for entry in rounds_of(answers[0]) if entry["draft"]][:6]
    start = behind[0]["start"]
    assert start >= len(CASES[0]["prompt_ids"]) + 20
    dspark.flush_cache()
    expected, _ = drafts_behind(dspark, text[:start], 6)
    assert [(entry["start"], entry["draft"], entry["accepted"]) for entry in behind] == expected
    dspark.flush_cache()
    with policy(dspark, "off"):
        generate(dspark, [endless(CASES[0]["prompt_ids"], start - len(CASES[0]["prompt_ids"]))], 1)
    found, cached = drafts_behind(dspark, text[:start], 6)
    assert found == expected and cached >= start - 2


def test_text_equals_the_target_alone(dspark, plain):
    check_text(dspark, plain)


def test_text_without_overlap_with_chunked_prefill_in_pages_and_a_short_block(corner, plain):
    """The target's own text depends on none of them in float32."""
    found = corner.get_json("/dspark/capabilities")
    assert found["drafter"]["window"] == {"size": 12, "sinks": 4} and found["block_size"] == 3
    assert [said.split(":")[0] for said in found["adjusted_flags"]] == [
        "--speculative-num-draft-tokens=4 becomes --speculative-dspark-block-size=3",
    ]
    check_text(corner, plain)


def check_text(server, plain):
    bodies = mixed_bodies(27, seed=1)
    expected = output_ids(plain, bodies, 16)
    with policy(server, "random"):
        assert output_ids(server, bodies[:4], 1) == expected[:4]
        assert output_ids(server, bodies, 16) == expected
    assert output_ids(server, with_options(bodies), 16) == expected


def test_text_under_the_policy_that_waits_for_a_steps_own_values(dspark, plain):
    """All policies: tests/worker/test_eager_executor.py."""
    bodies = mixed_bodies(18, seed=2)
    expected = output_ids(plain, bodies, 16)
    with policy(dspark, "early-stop"):
        assert output_ids(dspark, bodies[:3], 1) == expected[:3]
        assert output_ids(dspark, bodies, 16) == expected
        assert output_ids(dspark, with_options(bodies), 8) == expected
        assert dspark.get_json("/dspark/stats")["policy"] == "early-stop"


def test_text_while_policies_change_under_load(dspark, plain):
    bodies = mixed_bodies(27, seed=4)
    expected = output_ids(plain, bodies, 16)
    texts: list[list[int]] = []
    thread = in_background(lambda: texts.extend(output_ids(dspark, bodies, 8)))
    while thread.is_alive():
        for settings in POLICIES:
            with policy(dspark, **settings):
                thread.join(0.2)
    assert texts == expected


def test_prefix_hit_keeps_the_accept_length(dspark):
    """Draft K/V of a cached prefix is there as well: the second run is served from the cache and accepts as much."""
    prompt = CASES[1]["prompt_ids"] * 3
    dspark.flush_cache()
    with policy(dspark, "static"):  # under auto the accept length follows measured times
        first, second = (generate(dspark, [greedy(prompt, 48)], 1)[0]["meta_info"] for _ in range(2))
    assert first["cached_tokens"] == 0
    assert second["cached_tokens"] >= len(prompt) - 1
    assert second["spec_accept_length"] == first["spec_accept_length"] > 2


def test_abort_in_mid_stream(dspark, plain):
    """Clients that go away leave no slots behind and do not disturb their neighbours."""
    bodies = mixed_bodies(12, seed=5)
    host = dspark.url.removeprefix("http://")
    for i in range(6):
        connection = http.client.HTTPConnection(host, timeout=60)
        body = endless(prompts(6, seed=i)[i], 800, stream=True)
        connection.request("POST", "/generate", json.dumps(body), {"Content-Type": "application/json"})
        connection.getresponse().read(64)
        if i == 0:
            started = output_ids(dspark, bodies, 4)
        connection.close()
    assert started == output_ids(plain, bodies, 4)
    assert_pool_is_whole(dspark)
