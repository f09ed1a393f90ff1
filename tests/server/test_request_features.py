"""Every request feature that SGLang has without speculation: the DSPARK server answers what the plain server answers.

Each alone, and every two of them at once. The plain server schedules synchronously: under overlap SGLang counts
penalties one token late.
"""

from __future__ import annotations

import functools
import json
import math
import random
import re
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from golden_server import CASES, TOL, assert_same_states, events, generate, greedy, policy, rounds_of, states_of
from target_distribution import pairwise

from sglang_dspark.tools.launch import LaunchedServer

PROMPTS = [case["prompt_ids"] for case in CASES[:4]]
PERSON = {
    "type": "object",
    "properties": {
        "имя": {"type": "string", "maxLength": 6},
        "年": {"type": "integer"},
        "답": {"enum": ["да", "дом", "نعم", "نعت", "😀", "😁"]},
    },
    "required": ["имя", "年", "답"],
}
TAGS = {"structures": [{"begin": "{", "schema": {"enum": [3, "日本", "日木"]}, "end": "}"}], "triggers": ["{"]}

# Sampling parameters, and fields of the request.
FEATURES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "nothing": ({}, {}),
    "frequency-penalty": ({"frequency_penalty": 0.8}, {}),
    "frequency-reward": ({"frequency_penalty": -0.3}, {}),
    "presence-penalty": ({"presence_penalty": 1.5}, {}),
    "repetition-penalty": ({"repetition_penalty": 1.6}, {}),
    "repetition-reward": ({"repetition_penalty": 0.7}, {}),
    "additive-penalties": ({"frequency_penalty": 0.5, "presence_penalty": 0.5, "min_new_tokens": 20}, {}),
    "min-new-tokens": ({"min_new_tokens": 40, "logit_bias": {"1": 30.0}}, {}),
    "logit-bias": ({"logit_bias": {"5": 4.0, "21": -100.0}}, {}),
    "stop-string": ({"stop": ["zz", "ksw"]}, {}),
    "stop-string-kept": ({"stop": "2w", "no_stop_trim": True}, {}),
    "stop-token-ids": ({"stop_token_ids": [21, 39]}, {}),
    "stop-regex": ({"stop_regex": "s[a-z][^a-z]k"}, {}),
    "stop-letter": ({"regex": "[а-яё日]{30}", "stop": ["日", "ё", "я"]}, {}),
    "ignore-eos": ({"ignore_eos": True, "max_new_tokens": 90}, {}),
    "regex": ({"regex": "(日本|日木|한국|한글){2}, [а-я]{3,9}(, [a-zé]+){2}"}, {}),
    "json-schema": ({"json_schema": json.dumps(PERSON)}, {}),
    "ebnf": ({"ebnf": 'root ::= item+\nitem ::= "да" | "дом" | "مرحبا" | "e\u0301" | [0-9]'}, {}),
    "regex-with-penalties": ({"regex": "[а-яё ]{40}", "frequency_penalty": 0.5, "presence_penalty": 0.3}, {}),
    "two-samples": ({"n": 2}, {}),
    "logprobs": ({}, {"return_logprob": True}),
    "top-logprobs": ({}, {"return_logprob": True, "top_logprobs_num": 3}),
    "prompt-logprobs": ({}, {"return_logprob": True, "logprob_start_len": 0, "top_logprobs_num": 2}),
    "some-prompt-logprobs": ({}, {"return_logprob": True, "logprob_start_len": 3}),
    "logprobs-of-named-tokens": ({}, {"return_logprob": True, "token_ids_logprob": [3, 7, 250]}),
    "logprobs-under-penalties": ({"frequency_penalty": 0.5}, {"return_logprob": True, "top_logprobs_num": 2}),
    "logprobs-of-a-regex": ({"regex": "[😀-😏あ-お]{12}"}, {"return_logprob": True}),
    "hidden-states": ({}, {"return_hidden_states": True}),
    "priority": ({}, {"priority": 3}),
    "streamed-interval": ({"stream_interval": 4}, {}),
}


def body(feature: str, prompt: list[int]) -> dict[str, Any]:
    parameters, fields = FEATURES[feature]
    return greedy(prompt, 48, parameters, **fields)


@pytest.fixture
def answers(letters, plain_letters) -> dict[str, dict[str, Any]]:
    return answers_of_both(letters, plain_letters)


@functools.cache
def answers_of_both(letters: LaunchedServer, plain_letters: LaunchedServer) -> dict[str, dict[str, Any]]:
    """Answers by server and feature, of many concurrent requests that all want something else."""
    wanted = [(feature, PROMPTS[1]) for feature in FEATURES]
    # A plain server ends when requests that name tokens share a prefill with others that want logprobs.
    naming = [(feature, prompt) for feature, prompt in wanted if "token_ids_logprob" in FEATURES[feature][1]]
    others = [pair for pair in wanted if pair not in naming]
    plain = [generate(plain_letters, [body(*pair) for pair in pairs], 12) for pairs in (others, naming)]
    with policy(letters, "random"):
        dspark = generate(letters, [body(*pair) for pair in wanted], 12)
    return {
        "plain": {feature: of_feature(feature, others + naming, plain[0] + plain[1]) for feature in FEATURES},
        "dspark": {feature: of_feature(feature, wanted, dspark) for feature in FEATURES},
    }


def of_feature(feature: str, asked: list[tuple[str, list[int]]], results: list[Any]) -> list[Any]:
    """Its answers, by prompt."""
    return [answer for (name, _), answer in zip(asked, results, strict=True) if name == feature]


@pytest.mark.parametrize("feature", FEATURES)
def test_answers_equal_those_of_the_plain_server(answers, feature):
    for answer, expected in zip(answers["dspark"][feature], answers["plain"][feature], strict=True):
        for one, other in zip(as_list(answer), as_list(expected), strict=True):
            assert_same(one, other, has_logprobs="logprobs" in feature)


def assert_same(answer: dict[str, Any], expected: dict[str, Any], *, has_logprobs: bool) -> None:
    assert answer["output_ids"] == expected["output_ids"]
    assert answer["text"] == expected["text"]
    assert answer["meta_info"]["finish_reason"] == expected["meta_info"]["finish_reason"]
    names = {name for name in expected["meta_info"] if "logprobs" in name}
    assert bool(names) == has_logprobs
    for name in names:
        assert_close(answer["meta_info"][name], expected["meta_info"][name])
    assert_same_states(answer, expected)


def as_list(answer: Any) -> list[Any]:
    return answer if isinstance(answer, list) else [answer]


def assert_close(value: Any, expected: Any) -> None:
    if isinstance(expected, list):
        assert len(value) == len(expected)
        for one, other in zip(value, expected, strict=True):
            assert_close(one, other)
    elif isinstance(expected, float):
        assert math.isclose(value, expected, rel_tol=TOL, abs_tol=TOL)
    else:
        assert value == expected


def test_features_change_the_text(answers):
    """A feature that both servers ignored would pass the comparison."""
    texts = {feature: [as_list(a)[0]["output_ids"] for a in found] for feature, found in answers["plain"].items()}
    same = {feature for feature, found in texts.items() if found == texts["nothing"]}
    assert same == {name for name in FEATURES if name == "nothing" or "sample" in name or "prompt" in name} | {
        *("logprobs", "top-logprobs", "logprobs-of-named-tokens", "hidden-states"),
        *("priority", "streamed-interval"),
    }
    for answer in answers["dspark"]["json-schema"]:
        if answer["meta_info"]["finish_reason"]["type"] == "stop":
            assert set(json.loads(answer["text"])) == PERSON["properties"].keys()


def test_of_several_ends_in_a_block_the_first_counts(letters, plain_letters):
    """A stop token, and a few tokens later the most tokens that were asked for, or a stop string."""
    bodies = []
    prompt = PROMPTS[0]
    [answer] = generate(plain_letters, [greedy(prompt, 48)], 1)
    ids, text = answer["output_ids"], answer["text"]
    assert len(ids) == len(text) == 48
    for stop in sorted(set(ids)):
        place = ids.index(stop)
        for end in range(place + 2, min(place + 7, 48)):
            bodies.append(greedy(prompt, end, {"stop_token_ids": [stop]}))
            if text.index(text[end - 1 : end + 1]) == end - 1:
                bodies.append(greedy(prompt, 48, {"stop": text[end - 1 : end + 1], "stop_token_ids": [stop]}))
        bodies.append(greedy(prompt, 48, {"stop_regex": f"{re.escape(text[place])}$"}))
    expected = generate(plain_letters, bodies, 8)
    with policy(letters, "static"):
        answers = generate(letters, bodies, 8)
    for key in ("output_ids", "text"):
        assert [answer[key] for answer in answers] == [answer[key] for answer in expected]
    reasons, rightly = ([answer["meta_info"]["finish_reason"] for answer in found] for found in (answers, expected))
    assert reasons == rightly
    assert {type(reason["matched"]) for reason in reasons} == {int, str}  # none ended for its length


def test_streams_say_the_same_and_count_their_tokens(letters, plain_letters):
    request = {"model": "m", "prompt": PROMPTS[1], "max_tokens": 40, "temperature": 0, "frequency_penalty": 0.5}
    request |= {"logprobs": 2, "stream_options": {"include_usage": True}}
    streams = [events(server, "/v1/completions", request) for server in (letters, plain_letters)]
    choices = [[choice for chunk in chunks for choice in chunk["choices"]] for chunks in streams]
    texts = ["".join(choice["text"] for choice in found) for found in choices]
    assert texts[0] == texts[1] != ""
    usages = [next(chunk["usage"] for chunk in reversed(chunks) if chunk.get("usage")) for chunks in streams]
    assert usages[0] == usages[1]
    told = [[c["logprobs"]["token_logprobs"] for c in found if c.get("logprobs")] for found in choices]
    logprobs = [[value for values in found for value in values] for found in told]
    assert_close(*logprobs)
    assert len(logprobs[0]) == usages[0]["completion_tokens"]


def test_hidden_states_of_prompts_and_streams(letters, plain_letters):
    """Of all tokens that were encoded, of those after a cached prefix, and as SGLang does, of the last chunk only."""
    noise = random.Random("states")
    prompt = noise.choices(range(3, 60), k=50)
    encoded = []
    for asked in (prompt, [*prompt, 7, 8, 9], noise.choices(range(3, 60), k=150)):
        body = greedy(asked, 20, return_hidden_states=True)
        streams = [events(server, "/generate", body) for server in (letters, plain_letters)]
        for messages in streams:
            assert all(len(states_of(message)) == len(message["output_ids"]) for message in messages)
        answer, expected = (messages[-1] for messages in streams)
        assert_same(answer, expected, has_logprobs=False)
        encoded.append([len(one["meta_info"]["hidden_states"][0]) for one in (answer, expected)])
    assert encoded == [[50, 50], [3, 3], [150 - 2 * 64, 150]]


WORDS = {"type": "array", "items": {"enum": ["да", "дом", "日本", "日木", "نعم"]}, "minItems": 4, "maxItems": 9}
# Sampling parameters. Grammars may end after the fewest tokens that another axis asks for.
GRAMMARS: list[dict[str, Any]] = [
    {},
    {"regex": "(да|дом|한국|한글|[a-z ]){24,60}"},
    {"json_schema": json.dumps(WORDS)},
    {"ebnf": 'root ::= item+\nitem ::= "да" | "дом" | "😀" | "😁" | [a-z0-9]'},
    {"structural_tag": json.dumps({"type": "structural_tag", **TAGS})},
]
# One at a time: SGLang keeps the kinds in a set, so that what is added comes before or after what is multiplied as it
# happens in a process.
PENALTIES: list[dict[str, Any]] = [
    {},
    {"frequency_penalty": 0.6},
    {"repetition_penalty": 1.5},
    {"presence_penalty": 0.4},
]
ENDS: list[dict[str, Any]] = [
    {},
    {"min_new_tokens": 12},
    {"stop": ["а", "木", "q1"]},
    {"stop_token_ids": [1, 33, 47]},
    {"stop_regex": "[дk😁]."},
]
BIASES: list[dict[str, Any]] = [{}, {"logit_bias": {"5": 4.0, "21": -100.0}}]
SAMPLES: list[dict[str, Any]] = [{}, {"n": 2}]
# Fields of the request.
TOLD: list[dict[str, Any]] = [
    {},
    {"return_logprob": True, "top_logprobs_num": 3},
    {"return_logprob": True, "logprob_start_len": 0, "return_hidden_states": True},
    {"return_hidden_states": True},
]
STREAMS: list[dict[str, Any]] = [{}, {"stream": True}]
SPECULATION: list[dict[str, Any]] = [
    {},
    {"enabled": False},
    {"max_verify": 1, "trace": True},
    {"confidence_threshold": 0.6},
    {"preset": "none"},
    {"preset": "summarization", "min_ngram": 1},
    {"preset": "classification", "candidates": ["да", "дом", "日本", "😀"]},
    {"prediction": {"type": "content", "content": "дом: да, 日本 😀"}},
]


def pairs() -> list[dict[str, Any]]:
    """Bodies of one prompt in which all pairs of values of different axes meet."""
    found = []
    for *parameters, told, stream, speculation in pairwise(
        GRAMMARS, PENALTIES, ENDS, BIASES, SAMPLES, TOLD, STREAMS, SPECULATION
    ):
        together = {key: value for each in parameters for key, value in each.items()}
        found.append(greedy(CASES[1]["prompt_ids"], 32, together, **told, **stream, speculation=speculation))
    return found


def samples(server: LaunchedServer, body: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the samples of an answer; of a stream, what it has said in the end."""
    if not body.get("stream"):
        return as_list(server.post_json("/generate", body))
    parts = events(server, "/generate", body)
    return [part for _, part in sorted({part.get("index", 0): part for part in parts}.items())]


def test_every_two_features_at_once(letters, plain_letters):
    def answered(server: LaunchedServer, asked: list[dict[str, Any]]) -> list[list[dict[str, Any]]]:
        with ThreadPoolExecutor(12) as pool:
            return list(pool.map(lambda body: samples(server, body), asked))

    asked = pairs()
    expected = answered(plain_letters, [{**body, "speculation": None} for body in asked])
    with policy(letters, "random"):
        answers = answered(letters, asked)
    for body, found, rightly in zip(asked, answers, expected, strict=True):
        assert len(found) == len(rightly)
        for one, other in zip(found, rightly, strict=True):
            assert_same(one, other, has_logprobs="return_logprob" in body)


CHATS: dict[str, dict[str, Any]] = {
    "logprobs": {"logprobs": True, "top_logprobs": 2},
    "json-schema": {"response_format": {"type": "json_schema", "json_schema": {"name": "person", "schema": PERSON}}},
    "json-object": {"response_format": {"type": "json_object"}},
    "penalties": {"presence_penalty": 0.5, "logit_bias": {"11": 2}},
    "structural-tag": {"response_format": {"type": "structural_tag", **TAGS}},
    "hidden-states": {"return_hidden_states": True},
    "last-hidden-state": {"return_hidden_states": "last"},
    "tool": {
        "tools": [{"type": "function", "function": {"name": "save", "parameters": PERSON}}],
        "tool_choice": "required",
    },
}


@pytest.mark.parametrize("kind", CHATS)
def test_chats(letters, plain_letters, kind):
    messages = [{"role": "user", "content": "человека, 请, 부탁 👩‍👩‍👧"}]
    request = {"model": "m", "messages": messages, "max_tokens": 40, "temperature": 0, **CHATS[kind]}
    choice, expected = (
        server.post_json("/v1/chat/completions", request)["choices"][0] for server in (letters, plain_letters)
    )
    for message in (choice["message"], expected["message"]):
        for called in message.get("tool_calls") or ():  # null once, now left out
            del called["id"]
    assert choice["message"] == expected["message"]
    assert choice["finish_reason"] == expected["finish_reason"]
    assert_close(choice.get("hidden_states", []), expected.get("hidden_states", []))
    assert bool(choice.get("hidden_states")) == ("hidden-state" in kind)
    if kind == "logprobs":
        assert_close(*([token["logprob"] for token in c["logprobs"]["content"]] for c in (choice, expected)))


def test_what_a_grammar_forces_is_drafted(letters):
    """The drafter knows nothing of the alphabet; without candidates it takes a step for every letter."""
    regex = {"regex": "[xy]abcdefghijklmnopqrstuvwxyz"}
    bodies = [greedy(PROMPTS[0], 40, regex), greedy(PROMPTS[0], 40, regex, speculation={"preset": "none"})]
    with policy(letters, "static"):
        forced, drafted = generate(letters, bodies, 1)
    assert forced["output_ids"] == drafted["output_ids"]
    steps = [answer["meta_info"]["spec_verify_ct"] for answer in (forced, drafted)]
    assert steps[0] <= 6 < 15 <= steps[1]


def test_a_key_with_what_a_grammar_forces(letters):
    """Two requests share their steps: one has a grammar that forces its text, and one copies an answer."""
    forced = greedy(PROMPTS[0], 40, {"regex": "[xy]abcdefghijklmnopqrstuvwxyz"}, speculation={"trace": True})
    kept = greedy(PROMPTS[1], 40, speculation={"cache": "letters", "trace": True})
    with policy(letters, "static"):
        alone = generate(letters, [forced, kept], 1)
        beside = generate(letters, [forced, kept], 2)
    assert [answer["output_ids"] for answer in beside] == [answer["output_ids"] for answer in alone]
    copied, followed = ([rounds_of(answer) for answer in answers] for answers in (alone, beside))
    assert any(entry["from_cache"] for entry in followed[1]) and not any(entry["from_cache"] for entry in copied[1])
    # Not the same drafts: with the other prompt, a letter comes without any.
    assert all(any(entry["copied"] for entry in rounds[0]) for rounds in (copied, followed))
    assert not any(entry["copied"] for entry in followed[1])


def test_prompt_up_to_the_context_limit(letters, plain_letters):
    """The last tokens of the context, with counts and logprobs along the whole prompt."""
    prompt = (PROMPTS[0] * 200)[:1000]
    parameters = {"frequency_penalty": 0.3, "ignore_eos": True}
    request = greedy(prompt, 23, parameters, return_logprob=True, logprob_start_len=990)
    answer, expected = (server.post_json("/generate", request) for server in (letters, plain_letters))
    assert answer["output_ids"] == expected["output_ids"]
    assert_close(answer["meta_info"]["input_token_logprobs"], expected["meta_info"]["input_token_logprobs"])


def test_a_grammar_ends_a_text_that_ignores_its_end(letters, plain_letters):
    """A plain server draws one more token after the end of a grammar of xgrammar's."""
    asked = greedy(PROMPTS[0], 10, {"regex": "[a-c]{3}", "ignore_eos": True})
    ours, theirs = (server.post_json("/generate", asked)["output_ids"] for server in (letters, plain_letters))
    assert (len(ours), len(theirs), theirs[:4]) == (4, 5, ours)
