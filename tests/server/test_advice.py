"""Requests about which advice cannot be had are answered as on a plain server, beside others that notice nothing."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from golden_server import call, generate, mixed_bodies, output_ids, policy

import sglang_dspark

FORKS = ["ok: (да|нет)", "(é|è)+x?", "ok (☀|☂)", "(한국|학교) ok", "[а-яё]{2,5}"]
"""Expressions whose alternatives share the first bytes of different letters."""
ENUM = {"type": "object", "properties": {"a": {"enum": ["да", "нет"]}}, "required": ["a"]}
CHAT = {"model": "m", "messages": [{"role": "user", "content": "да или нет?"}], "temperature": 0, "max_tokens": 40}


def constrained(regex, max_new_tokens=30, **fields):
    parameters = {"temperature": 0, "max_new_tokens": max_new_tokens, "regex": regex}
    return {"text": "the answer is", "sampling_params": parameters, **fields}


def answered(server, body):
    choice = server.post_json("/v1/chat/completions", body)["choices"][0]
    return choice["message"]["content"]


def test_grammars_that_fork_within_a_letter(letters, plain_letters):
    """Xgrammar says what is forced as a text, to the byte; the plain server runs the same masks."""
    bodies = [constrained(regex) for regex in FORKS]
    texts = [[answer["output_ids"] for answer in generate(server, bodies, 5)] for server in (letters, plain_letters)]
    assert texts[0] == texts[1]
    schema = CHAT | {"response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": ENUM}}}
    objects = [json.loads(answered(server, schema)) for server in (letters, plain_letters)]
    assert objects[0] == objects[1] and objects[0]["a"] in ENUM["properties"]["a"]["enum"]


def test_forced_tokens_that_the_target_does_not_have(letters):
    """The tokenizer makes one token of a text that the grammar lets the target write letter by letter."""
    answer = letters.post_json("/generate", constrained("x<beyond>yz"))
    assert answer["text"] == "x<beyond>yz"


@pytest.mark.parametrize(("label", "reason"), [("<beyond>", "token 256"), ("\u200b", "no token")])
def test_labels_that_no_answer_can_hold(letters, label, reason):
    body = constrained("да|нет", speculation={"preset": "classification", "candidates": ["да", label]})
    status, text = call(letters, "/generate", body=body)
    assert status == 400 and "speculation.candidates" in text and reason in text


def test_a_long_forced_text_is_copied_from_its_beginning(letters):
    with policy(letters, "static"):
        answer = letters.post_json("/generate", constrained("(abcd ){9}" * 10, max_new_tokens=1000))
    assert answer["text"] == "abcd " * 90
    assert answer["meta_info"]["dspark"]["accept_length"] > 7.5


def asking_for_advice():
    """Bodies of mixed requests that ask for whatever there is."""
    fields = [
        {"preset": "summarization", "trace": True},
        {"preset": "classification", "candidates": ["да", "нет", "12 34"]},
        {"prediction": {"type": "content", "content": "да, <beyond> нет 12 34"}},
        {"cache": "ключ", "trace": True},
        {},
    ]
    bodies = mixed_bodies(40, seed=5)
    return [body | {"speculation": fields[place % 5]} for place, body in enumerate(bodies)]


@pytest.mark.thorough
def test_advice_that_fails_costs_nothing_but_itself(planted, advised, plain_letters):
    """Two of three calls of every function that advises raise, half of them behind their work."""
    bodies = asking_for_advice()
    expected = output_ids(plain_letters, [body | {"speculation": None} for body in bodies], 16)
    for server in (advised, planted):
        assert output_ids(server, bodies, 16) == expected
        assert output_ids(server, bodies, 16) == expected
    grammars = [constrained(regex) for regex in FORKS]
    assert output_ids(planted, grammars, 5) == output_ids(advised, grammars, 5)
    stream = CHAT | {"stream": True}
    for _ in range(3):
        assert answered(planted, CHAT) == answered(advised, CHAT)
        status, events = call(planted, "/v1/chat/completions", body=stream)
        assert status == 200 and events.rstrip().endswith("[DONE]")
    statuses = [call(planted, "/dspark/capabilities")[0] for _ in range(3)]
    assert sorted(statuses) == [200, 503, 503]


@pytest.mark.thorough
def test_every_function_that_advises_has_failed(planted, advised):
    """The log names each once, the statistics count them; where nothing is planted, nothing fails."""
    output_ids(planted, asking_for_advice(), 16)
    status = 503
    while status == 503:
        status, text = call(planted, "/dspark/stats")
    failed = json.loads(text)["failed_advice"]
    assert failed.keys() == advised_names()
    log = planted.log_path.read_text()
    assert [log.count(f"DSPARK: {what} failed and are left out") for what in failed] == [1] * len(failed)
    exported = set(re.findall(r'sglang:dspark_failed_advice_total{.*?advice="(.+?)"', call(planted, "/metrics")[1]))
    assert {"candidates", "traces", "statistics of steps"} <= exported
    assert advised.get_json("/dspark/stats")["failed_advice"] == {}


def advised_names():
    """Returns the purposes of the package's functions behind the fence."""
    sources = Path(sglang_dspark.__file__).parent.rglob("*.py")
    return {
        what for source in sources for what in re.findall(r'^\s*@fenced\("(.+?)"', source.read_text(), re.MULTILINE)
    }
