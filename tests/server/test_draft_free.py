"""Tests of a server without a drafter: presets speculate, and everything else decodes plainly.

Texts that have parts go through parsers, Ollama and ends of a text as on the plain server.
"""

from __future__ import annotations

import pytest
from family_targets import END, REASONING, TOOL_CALL
from golden_server import (
    CASES,
    assert_pool_is_whole,
    call,
    counting,
    events,
    greedy,
    mixed_bodies,
    output_ids,
    refused,
    traced,
    with_options,
)


def without_confidence(bodies):
    """There is no confidence head to bound anything by."""
    for body in bodies:
        body["speculation"] = {k: v for k, v in body["speculation"].items() if k != "confidence_threshold"}
    return bodies


def test_text_equals_the_target_alone(draft_free, plain):
    bodies = mixed_bodies(36, seed=21)
    expected = output_ids(plain, bodies, 16)
    with counting(draft_free) as counts:
        assert output_ids(draft_free, without_confidence(with_options(bodies[:9])), 1) == expected[:9]
        assert output_ids(draft_free, without_confidence(with_options(bodies)), 16) == expected
    assert counts["copied_tokens"] == counts["verified_tokens"] > 0
    assert counts["drafted_tokens"] == 0
    assert_pool_is_whole(draft_free)


def test_only_presets_speculate(draft_free):
    def verified(**options):
        answer, rounds = traced(draft_free, greedy(CASES[0]["prompt_ids"], 64), **options)
        assert answer["output_ids"] == CASES[0]["output_ids"]
        return [entry["verified"] for entry in rounds]

    assert set(verified()) == {0}
    rounds = verified(preset="summarization")
    assert max(rounds) == 7
    assert len(rounds) < 40


@pytest.mark.parametrize(
    ("path", "body", "named"),
    [
        ("/generate", greedy([5, 6, 7], 4, speculation={"confidence_threshold": 0.5}), "confidence_threshold needs a"),
        ("/dspark/policy", {"policy": "static"}, "--speculative-dspark-draft-free serves without one"),
    ],
)
def test_what_needs_a_drafter_is_refused(draft_free, path, body, named):
    assert named in refused(draft_free, path, body)


def test_capabilities_without_a_drafter(draft_free):
    found = draft_free.get_json("/dspark/capabilities")
    assert (found["effective_decode_path"], found["drafter"]) == ("dspark", None)
    assert "requests with a preset or prediction speculate" in found["reason"]
    available = {name for name, policy in found["policies"].items() if policy["available"]}
    assert available == {"auto", "off"}
    served = set(found["features"]["speculation_fields"])
    assert {"preset", "trace"} <= served
    assert "confidence_threshold" not in served
    assert "no drafter" in draft_free.log_path.read_text()


def test_routes_behind_a_proxy(draft_free):
    """The proxy takes its prefix off, and the application sees it all the same."""
    assert call(draft_free, "/dspark")[0] == 200
    assert call(draft_free, "/dspark/stats")[0] == 200
    assert "no_such_key" in refused(draft_free, "/generate", greedy([5, 6], 2, speculation={"no_such_key": 1}))
    assert refused(draft_free, "/pd_role_switch", {})


TOOLS = [{"type": "function", "function": {"name": "get_time", "parameters": {"type": "object", "properties": {}}}}]


def chat(input_ids, max_tokens, **more):
    """A greedy chat that goes on after these tokens."""
    messages = [{"role": "user", "content": "as in input_ids"}]
    fixed = {"model": "m", "messages": messages, "temperature": 0}
    return {**fixed, "input_ids": input_ids, "max_tokens": max_tokens, **more}


ASK_FOR_TOOL = chat(TOOL_CALL, 7, tools=TOOLS, separate_reasoning=False)


def deltas(server, body):
    return [choice["delta"] for event in events(server, "/v1/chat/completions", body) for choice in event["choices"]]


def joined(server, body):
    """Reasoning and content of a streamed chat."""
    found = deltas(server, body)
    return {name: "".join(delta.get(name) or "" for delta in found) for name in ("reasoning_content", "content")}


def calls(server, body):
    """Names and arguments of the tool calls of a stream, put together as a client does."""
    functions = [call_["function"] for delta in deltas(server, body) for call_ in delta.get("tool_calls") or ()]
    return {name: "".join(function.get(name) or "" for function in functions) for name in ("name", "arguments")}


@pytest.mark.slow
def test_a_tool_call_in_one_step_keeps_its_arguments(plain_parsers, parsers):
    expected = calls(plain_parsers, ASK_FOR_TOOL)
    assert expected == {"name": "get_time", "arguments": "{}"}
    assert calls(parsers, ASK_FOR_TOOL) == expected
    whole = parsers.post_json("/v1/chat/completions", ASK_FOR_TOOL)["choices"][0]["message"]["tool_calls"]
    assert [(one["function"]["name"], one["function"]["arguments"]) for one in whole] == [("get_time", "{}")]


@pytest.mark.parametrize("max_verify", [2, 7])
@pytest.mark.slow
def test_reasoning_ends_at_its_mark_wherever_a_step_ends(plain_parsers, parsers, max_verify):
    body = chat(REASONING, 16)
    expected = joined(plain_parsers, body)
    assert expected["reasoning_content"] and expected["content"].startswith("57")
    assert joined(parsers, body | {"speculation": {"max_verify": max_verify}}) == expected


@pytest.mark.parametrize("max_tokens", [1, 8])
@pytest.mark.slow
def test_reasoning_has_no_more_tokens_than_the_answer(plain_parsers, parsers, max_tokens):
    body = greedy(CASES[0]["prompt_ids"], max_tokens, require_reasoning=True)
    counts = [
        [server.post_json("/generate", body)["meta_info"][name] for name in ("reasoning_tokens", "completion_tokens")]
        for server in (plain_parsers, parsers)
    ]
    assert counts == [[max_tokens, max_tokens]] * 2
    counted = {"include_usage": True, "continuous_usage_stats": True}
    body = chat(CASES[0]["prompt_ids"], max_tokens, stream_options=counted)
    usage = [event["usage"] for event in events(parsers, "/v1/chat/completions", body) if event.get("usage")]
    assert usage
    assert all(one["reasoning_tokens"] <= one["completion_tokens"] for one in usage)


@pytest.mark.slow
def test_log_probabilities_come_with_their_tokens(plain_parsers, parsers):
    body = chat(CASES[0]["prompt_ids"], 12, logprobs=True, top_logprobs=2)

    def tokens(server):
        found = [
            choice["logprobs"]["content"]
            for event in events(server, "/v1/chat/completions", body)
            for choice in event["choices"]
            if choice.get("logprobs")
        ]
        return [(entry["token"], round(entry["logprob"], 3)) for entries in found for entry in entries]

    assert len(tokens(plain_parsers)) == 12
    assert tokens(parsers) == tokens(plain_parsers)


OLLAMA = {
    "/api/chat": ({"messages": [{"role": "user", "content": "the dog"}]}, lambda event: event["message"]["content"]),
    "/api/generate": ({"prompt": "the dog"}, lambda event: event["response"]),
}


@pytest.mark.parametrize("route", OLLAMA)
@pytest.mark.slow
def test_ollama_loses_no_more_than_the_last_token(plain_parsers, parsers, route):
    # A stream of the plain server loses more when two of its tokens happen to share the last message.
    asked, text_of = OLLAMA[route]

    def body(num_predict):
        return {"model": "m", "options": {"temperature": 0, "num_predict": num_predict}, **asked}

    expected = text_of(plain_parsers.post_json(route, body(11) | {"stream": False}))
    assert expected.strip()
    assert "".join(map(text_of, events(parsers, route, body(12)))) == expected


@pytest.mark.parametrize("minimum", [0, 11, 12])
@pytest.mark.parametrize("ignore_eos", [False, True])
@pytest.mark.slow
def test_a_minimum_holds_for_every_end_token_of_the_model(plain_parsers, parsers, minimum, ignore_eos):
    body = greedy(REASONING, 24)
    body["sampling_params"] |= {"min_new_tokens": minimum, "ignore_eos": ignore_eos}
    expected, found = [server.post_json("/generate", body)["output_ids"] for server in (plain_parsers, parsers)]
    assert found == expected
    assert (expected[-1] == END and len(expected) == 12) == (minimum < 12 and not ignore_eos)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.slow
def test_samples_of_a_seeded_request_differ_and_come_back(parsers, stream):
    asked = {"model": "m", "prompt": "the dog", "max_tokens": 12, "temperature": 1, "ignore_eos": True}

    def texts(**more):
        if not stream:
            return [one["text"] for one in parsers.post_json("/v1/completions", asked | more)["choices"]]
        found = [choice for event in events(parsers, "/v1/completions", asked | more) for choice in event["choices"]]
        return ["".join(choice["text"] for choice in found if choice["index"] == index) for index in range(more["n"])]

    samples = texts(seed=5, n=3)
    assert len(set(samples)) == 3
    assert texts(seed=5, n=3) == samples
    assert [texts(seed=seed, n=1)[0] for seed in (5, 6, 7)] == samples
