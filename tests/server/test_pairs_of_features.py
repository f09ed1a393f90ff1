"""Every two features that a request can ask for, asked for at once: the answer is the plain server's.

Bodies cover all pairs of values of different axes. The plain server schedules synchronously: under overlap SGLang
counts penalties one token late.
"""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from golden_server import CASES, call, greedy, policy
from pairwise import pairwise

from sglang_dspark.tools.launch import LaunchedServer

LOGPROB_TOL = 2e-4  # float32, logits of another batch shape
WORDS = {"type": "array", "items": {"enum": ["да", "дом", "日本", "日木", "نعم"]}, "minItems": 4, "maxItems": 9}
TAG = {"structures": [{"begin": "{", "schema": {"enum": ["да", "дом"]}, "end": "}"}], "triggers": ["{"]}
# Sampling parameters. Grammars may end behind the fewest tokens that another axis asks for.
GRAMMARS: list[dict[str, Any]] = [
    {},
    {"regex": "(да|дом|한국|한글|[a-z ]){24,60}"},
    {"json_schema": json.dumps(WORDS)},
    {"ebnf": 'root ::= item+\nitem ::= "да" | "дом" | "😀" | "😁" | [a-z0-9]'},
    {"structural_tag": json.dumps({"type": "structural_tag", **TAG})},
]
# One at a time: SGLang keeps the kinds in a set, so that what is added comes before or behind what is multiplied as it
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
LOGPROBS: list[dict[str, Any]] = [
    {},
    {"return_logprob": True, "top_logprobs_num": 3},
    {"return_logprob": True, "logprob_start_len": 0},
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
    {"preset": "replay", "recorded": CASES[0]["output_ids"]},
]


def bodies() -> list[dict[str, Any]]:
    """One prompt, and all pairs."""
    found = []
    for *parameters, logprobs, stream, speculation in pairwise(
        GRAMMARS, PENALTIES, ENDS, BIASES, SAMPLES, LOGPROBS, STREAMS, SPECULATION
    ):
        together = {key: value for each in parameters for key, value in each.items()}
        found.append(greedy(CASES[1]["prompt_ids"], 32, together, **logprobs, **stream, speculation=speculation))
    return found


def answered(server: LaunchedServer, asked: list[dict[str, Any]]) -> list[list[dict[str, Any]]]:
    """Samples of each answer; of a stream, what it has said in the end."""
    with ThreadPoolExecutor(12) as pool:
        return list(pool.map(lambda body: samples(*call(server, "/generate", body=body)), asked))


def samples(status: int, text: str) -> list[dict[str, Any]]:
    assert status == 200, text
    if not text.startswith("data: "):
        answer = json.loads(text)
        return answer if isinstance(answer, list) else [answer]
    parts = [json.loads(line.removeprefix("data: ")) for line in text.splitlines() if line.startswith("data: {")]
    return [part for _, part in sorted({part.get("index", 0): part for part in parts}.items())]


def said(answer: dict[str, Any]) -> list[Any]:
    return [answer["output_ids"], answer["text"], answer["meta_info"]["finish_reason"]]


def logprobs(answer: dict[str, Any]) -> list[float]:
    """All numbers of its lists of log-probabilities, in order."""
    lists = [
        answer["meta_info"].get(f"{side}_{kind}logprobs") for side in ("input", "output") for kind in ("token_", "top_")
    ]
    return numbers(lists)


def numbers(value: Any) -> list[float]:
    if isinstance(value, list):
        return [number for each in value for number in numbers(each)]
    return [value] if isinstance(value, float) else []


def test_every_two_features_at_once(letters, plain_letters):
    asked = bodies()
    expected = answered(plain_letters, [{**body, "speculation": None} for body in asked])
    with policy(letters, "random"):
        answers = answered(letters, asked)
    different = []
    for body, found, rightly in zip(asked, answers, expected, strict=True):
        if [said(each) for each in found] != [said(each) for each in rightly]:
            different.append((body, found, rightly))
        for one, other in zip(found, rightly, strict=True):
            assert logprobs(one) == pytest.approx(logprobs(other), rel=LOGPROB_TOL, abs=LOGPROB_TOL)
            assert bool(logprobs(one)) == ("return_logprob" in body)
    assert different == []
