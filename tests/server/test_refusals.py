"""Tests of bad input: HTTP 400 names the field, an end at start-up names the flag, and no option is dropped.

Requests about which advice cannot be had are answered as on a plain server.
"""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from golden_server import (
    DRAFT,
    TARGET,
    call,
    events,
    generate,
    greedy,
    mixed_bodies,
    output_ids,
    policy,
    refused,
)

import sglang_dspark
from sglang_dspark.tools.launch import PLUGIN


@pytest.mark.parametrize(
    ("path", "body", "named"),
    [
        ("/generate", {"input_ids": [5, 256]}, "input_ids"),
        ("/generate", {"input_ids": [5], "lora_path": "x"}, "--enable-lora"),
        ("/generate", {"input_ids": [5], "session_params": {"id": 3}}, "session_params.id"),
        ("/generate", {"text": "a", "speculation": {"max_verify": -1}}, "speculation.max_verify"),
        ("/generate", {"text": "a", "speculation": {"cache": "k"}}, "--speculative-dspark-answer-cache"),
        *(
            (route, {**body, "speculation": {key: value}}, f"speculation.{key}")
            for route, body in (
                ("/generate", {"text": "a"}),
                ("/v1/completions", {"model": "m", "prompt": "a"}),
            )
            for key, value in (("tpot_ms", "soon"), ("weight", True))
        ),
        ("/dspark/policy", {"policy": "static", "verify_len": 8}, "verify-len=8"),
        ("/dspark/policy", [], "JSON object"),
        ("/pd_role_switch", {}, "/pd_role_switch"),
        ("/dspark/drafter", {"path": "/no/such/folder"}, "/no/such/folder"),
        ("/dspark/drafter", {"path": 3}, "path"),
    ],
)
def test_what_is_refused_is_named_and_changes_nothing(dspark, path, body, named):
    """The tables: tests/engine/test_requests.py, tests/engine/test_requests.py, tests/test_config.py."""
    assert named in refused(dspark, path, body)
    assert dspark.get_json("/dspark/stats")["policy"] == "auto"


def test_a_number_without_log_probabilities_counts_for_no_one(dspark):
    """SGLang takes the largest one of a prefill: 257 of 256 tokens would end the server, a plain one too."""
    fields = {"return_logprob": [False, True], "top_logprobs_num": [257, 2], "logprob_start_len": [-1, 0]}
    alone, other = dspark.post_json("/generate", {"input_ids": [[5, 6, 7]] * 2, **fields})
    assert "output_top_logprobs" not in alone["meta_info"]
    assert {len(entry) for entry in other["meta_info"]["input_top_logprobs"][1:]} == {2}


def test_hostile_custom_params(dspark):
    """``custom_params`` is a public field; the plugin's own entry in it can hold anything.

    More of them: tests/engine/test_requests.py.
    """

    def asked(entry):
        return greedy([5, 6, 7], 4, {"custom_params": {"dspark": entry}})

    for entry, named in ((1, "speculation"), ('{"labels": [[5]]}', "speculation.labels")):
        assert named in refused(dspark, "/generate", asked(entry))
    answer = dspark.post_json("/generate", asked(None))
    assert len(answer["output_ids"]) == 4
    assert "dspark_trace" not in answer["meta_info"]


def test_bad_speculation_field_of_a_stream(dspark):
    """SGLang has sent its status before it looks at the request, and says so as for every other parameter."""
    error = events(dspark, "/generate", {"input_ids": [5, 6], "speculation": {"trace": 1}})[0]["error"]
    assert error["code"] == 400 and "speculation.trace" in error["message"]


# One process tries all of them: importing SGLang takes longer than everything else. Of each table a row or two, and
# rows that SGLang itself resolves first. The tables: tests/engine/test_checks.py, test_flags.py.
STARTUP = [
    (["--speculative-draft-model-path", ""], "--speculative-draft-model-path"),
    (["--speculative-draft-model-path", "./no-such-folder"], "no-such-folder"),
    (["--tp-size", "2", "--attn-cp-size", "2"], "--attn-cp-size=2"),
    (["--tp-size", "2", "--dp-size", "2", "--enable-dp-attention"], "dp-size=2; drop"),
    (["--quantization", "fp8", "--speculative-draft-model-quantization", "fp8"], "-draft-model-quantization=fp8"),
    (["--grammar-backend", "outlines"], "--grammar-backend=outlines"),
    (["--speculative-dspark-verify-len", "two"], "--speculative-dspark-verify-len='two'"),
    (["--speculative-dspark-fallback", "target-only", "--tp-size", "2", "--attn-cp-size", "2"], "--attn-cp-size=2"),
]
DRAFT_FREE = [
    ([], "--speculative-dspark-draft-free"),
    (["--speculative-dspark-draft-free", "--tp-size", "2", "--attn-cp-size", "2"], "--attn-cp-size=2"),
]

STARTUP_SCRIPT = """
import json, sys
from sglang.srt.plugins import load_plugins
load_plugins()
from sglang.srt.server_args import prepare_server_args
base, cases = json.loads(sys.argv[1])
for flags in cases:
    try:
        args = prepare_server_args(base + flags)
        args.resolve_once()
        print(json.dumps("accepted"))
    except BaseException as error:
        print(json.dumps(f"{type(error).__name__}: {error}"))
"""


def test_startup_refusals_name_flag_and_value(server_pool):
    base = ["--model-path", str(TARGET), "--device", "cpu", "--disable-cuda-graph", *PLUGIN]
    drafter = ["--speculative-draft-model-path", str(DRAFT)]
    cases = [([*drafter, *flags], named) for flags, named in STARTUP] + DRAFT_FREE
    tried = [drafter, ["--speculative-dspark-draft-free"], *[flags for flags, _ in cases]]
    with_drafter, without, *messages = server_pool.printed_by(STARTUP_SCRIPT, [base, tried])
    assert with_drafter == without == "accepted"
    for (flags, named), message in zip(cases, messages, strict=True):
        assert message.startswith(("ConfigError", "UnservedError", "CheckpointError")), (flags, message)
        assert named in message


def test_a_failing_plugin_is_seen(server_pool):
    """SGLang swallows exceptions of plugins; the user must still learn what is wrong."""
    script = """
import json, sys
sys.argv = ["launch_server", *json.loads(sys.argv[1])]
from sglang_dspark.engine import support
from sglang_dspark.engine import start
start.register_algorithm = lambda load_worker: 1 / 0
from sglang.srt.plugins import load_plugins
from sglang_dspark.plugin import register
for load in (load_plugins, register):
    try:
        load()
    except SystemExit as end:
        print(json.dumps(end.code))
    support.installed_sglang = lambda: "0.5.99"
"""
    found, elsewhere = server_pool.printed_by(script, ["--speculative-algorithm", "DSPARK"])
    assert found == "sglang-dspark cannot start: ZeroDivisionError: division by zero"
    assert elsewhere.startswith("sglang-dspark cannot start: sglang 0.5.99 is installed, and sglang-dspark")
    assert elsewhere.endswith("(ZeroDivisionError: division by zero)")


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
    text = refused(letters, "/generate", body)
    assert "speculation.candidates" in text and reason in text


def test_a_long_forced_text_is_copied_from_its_beginning(letters):
    with policy(letters, "static"):
        answer = letters.post_json("/generate", constrained("(abcd ){9}" * 10, max_new_tokens=1000))
    assert answer["text"] == "abcd " * 90
    assert answer["meta_info"]["dspark"]["accept_length"] > 7.5


def test_a_grammar_that_forces_text_without_end(letters):
    """Asked for all that it forces, it would never come back."""
    endless = constrained(None, max_new_tokens=20)
    del endless["sampling_params"]["regex"]
    endless["sampling_params"]["ebnf"] = 'root ::= "a" root'
    assert letters.post_json("/generate", endless)["text"] == "a" * 20


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
    """Two of three calls of every function that advises raise, half of them after their work."""
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
        status, text = call(planted, "/v1/chat/completions", body=stream)
        assert status == 200 and text.rstrip().endswith("[DONE]")
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
    """Returns the purposes of the package's functions under `best_effort`."""
    sources = Path(sglang_dspark.__file__).parent.rglob("*.py")
    return {
        what
        for source in sources
        for what in re.findall(r'^\s*@best_effort\("(.+?)"', source.read_text(), re.MULTILINE)
    }
