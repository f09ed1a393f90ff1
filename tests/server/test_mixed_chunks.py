"""Prompts that are encoded next to running requests: no text changes, and each token is counted."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from golden_server import (
    PACE_MS,
    VOCAB,
    assert_pool_is_whole,
    begun_stream,
    counting,
    endless,
    generate,
    greedy,
    in_background,
    output_ids,
    policy,
    while_running,
)

from sglang_dspark.tools.launch import LaunchedServer

KINDS: tuple[dict[str, Any], ...] = (
    {},
    {"frequency_penalty": 0.5, "repetition_penalty": 1.2, "min_new_tokens": 5},
    {"regex": "(red|blue|green|cat|dog|bird)+"},
    {"temperature": 1.0, "sampling_seed": 7},
)
"""Parameters of requests; seeded ones have a text of their own."""
RUNNING = endless([5, 6, 7], 900, speculation={"max_verify": 1})
PACED = {"pace_ms": PACE_MS / 4}


@contextmanager
def drafting_with_prompts(server: LaunchedServer, prompts: int) -> Iterator[None]:
    """Assert that at least so many prompts and chunks share a verification with drafts, and that some are kept."""
    before = server.get_json("/dspark/stats")
    yield
    after = server.get_json("/dspark/stats")
    assert after["prompts"]["beside"] - before["prompts"]["beside"] >= prompts
    drafts = [stats["drafts_beside_prompts"] for stats in (before, after)]
    verified, accepted = (drafts[1][name] - drafts[0][name] for name in ("verified", "accepted"))
    assert verified >= accepted > 0


def bodies() -> list[dict[str, Any]]:
    """Return requests with prompts of 1 to 500 tokens, some of which begin alike; chunks have 64 tokens."""
    draw = random.Random(4)
    shared = draw.choices(VOCAB, k=60)
    prompts = [draw.choices(VOCAB, k=length) for length in (1, 2, 7, 63, 64, 65, 90, 130, 1, 500, 3, 250)]
    return [
        greedy((shared if i % 3 else []) + prompt, draw.choice((5, 30)), KINDS[i % len(KINDS)])
        for i, prompt in enumerate(prompts)
    ]


def test_texts_next_to_prompts_of_every_length(letters, plain_letters):
    asked = bodies()
    expected = output_ids(plain_letters, asked)
    seeded = [i for i, body in enumerate(asked) if "sampling_seed" in body["sampling_params"]]
    for i, ids in zip(seeded, output_ids(letters, [asked[i] for i in seeded], 1), strict=True):
        expected[i] = ids
    forced = greedy([5, 6, 7], 900, {**KINDS[2], "min_new_tokens": 900}, speculation={"max_verify": 1})
    with policy(letters, "static", **PACED):  # only mixed steps draft nothing
        letters.flush_cache()
        with while_running(letters, RUNNING):
            answers = generate(letters, asked, 8)
        free = [i for i, body in enumerate(asked) if "regex" not in body["sampling_params"]]
        with (
            drafting_with_prompts(letters, len(free)),
            while_running(letters, RUNNING),
        ):  # while a grammar runs, none is
            assert output_ids(letters, [asked[i] for i in free], 1) == [expected[i] for i in free]
        with counting(letters) as grown, while_running(letters, forced):
            assert output_ids(letters, asked[:2]) == expected[:2]
    assert [answer["output_ids"] for answer in answers] == expected
    assert grown["plain_steps"] > 0  # next to a request with a grammar
    for counts in (answer["meta_info"] for answer in answers):
        committed = counts["dspark"]["rounds"] + counts["dspark"]["accepted_tokens"]
        assert 0 <= committed - (counts["completion_tokens"] - 1) <= 15  # the last round may go beyond the end


def test_clients_that_go_away_during_prompts(corner, plain):
    asked, texts = bodies()[::4], []
    expected = output_ids(plain, asked)
    with policy(corner, "static", **PACED), drafting_with_prompts(corner, 4), while_running(corner, RUNNING):
        thread = in_background(lambda: texts.extend(output_ids(corner, asked, 4)))
        for _ in range(4):
            with begun_stream(corner, endless([5, 6, 7], 800)):
                pass
        thread.join()
    assert texts == expected
    assert_pool_is_whole(corner)


def test_chunks_within_a_bound(parallel):
    """On two ranks, by the times of rank 0. A millisecond has room for no row: chunks are as short as can be."""
    draw = random.Random(6)
    asked = [greedy(draw.choices(VOCAB, k=length), 5) for length in (90, 130, 3, 12, 7, 9)]
    expected = output_ids(parallel, asked, 1)
    with policy(parallel, "static", **PACED):
        parallel.flush_cache()
        # Four requests have room for one that runs and three blocks of four rows of a prompt.
        with drafting_with_prompts(parallel, (90 + 130) // 8), while_running(parallel, RUNNING):
            assert output_ids(parallel, asked[:2], 2) + output_ids(parallel, asked[2:], 1) == expected


BRACES = {"begin": "{", "schema": {"type": "boolean"}, "end": "}"}
ENTERING: dict[str, dict[str, Any]] = {
    "plain": {},
    "regex": {"regex": "[a-f]{3}"},
    "schema": {"json_schema": '{"type": "integer"}'},
    "ebnf": {"ebnf": 'root ::= "red" | "blue"'},
    "tags": {"structural_tag": json.dumps({"type": "structural_tag", "structures": [BRACES], "triggers": ["{"]})},
}
"""Parameters by which a prompt enters SGLang's queue in another way; a new grammar is compiled before."""


@pytest.mark.thorough
def test_every_prompt_is_cut_to_the_bound(parallel):
    """A millisecond has room for no row: prompts of 90 tokens are read by 8 at a time, however they come."""
    draw, read, gaps = random.Random(8), {}, parallel.get_json("/dspark/capabilities")["gaps"]
    assert gaps["max_gap_ms"] == 1 < gaps["least_gap_ms"] == gaps["kept_gap_ms"]
    assert "--speculative-dspark-max-gap-ms=1 cannot be kept" in parallel.log_path.read_text()

    def chunks() -> int:
        return sum(parallel.get_json("/dspark/stats")["prompts"].values())

    parallel.flush_cache()  # drops grammars, too
    with policy(parallel, "static", **PACED), while_running(parallel, RUNNING):
        for way, parameters in ENTERING.items():
            before = chunks()
            generate(parallel, [greedy(draw.choices(VOCAB, k=90), 1, parameters)], 1)
            read[way] = chunks() - before
        session = parallel.post_json("/open_session", {"capacity_of_str_len": 1000})
        for turn in range(2):
            before = chunks()
            generate(parallel, [greedy(draw.choices(VOCAB, k=90), 1, session_params={"id": session})], 1)
            read[f"turn {turn}"] = chunks() - before
    assert min(read.values()) >= 90 // 8, read
