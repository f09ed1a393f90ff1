"""Tests of a server with keys and metrics, and of penalties, biases and grammars together.

Distributions are in tests/exactness.
"""

from __future__ import annotations

import json
import math
import re
import time
import urllib.request
from pathlib import Path
from typing import Any

import pytest
import torch
import xgrammar
from dspark_kernels import Adjustment
from golden_server import CASES, TARGET, call, counting, endless, greedy, in_background, output_ids, policy
from literal import literal_adjust
from prometheus_client.openmetrics.parser import text_string_to_metric_families as text_string_to_openmetrics
from prometheus_client.parser import text_string_to_metric_families
from transformers import AutoModelForCausalLM, AutoTokenizer

from sglang_dspark.tools.launch import open_directly

GRAFANA = Path(__file__).parents[2] / "docker" / "grafana" / "dspark.json"


def eventually(read, right):
    """Return what is read as soon as it is right, or after a minute: metrics are brought up to date once in a second.

    And the scheduler writes to its log after an answer.
    """
    deadline = time.monotonic() + 60
    while not right(found := read()) and time.monotonic() < deadline:
        time.sleep(0.3)
    return found


def decoded_tokens(server):
    """Return the tokens of decode steps that SGLang has counted."""
    name, labels = "sglang:realtime_tokens_total", {"mode": "decode"}
    return sum(s.value for s in exported(server) if s.name == name and labels.items() <= s.labels.items())


def exported(server):
    """Return the samples of Prometheus's."""
    families = text_string_to_metric_families(call(server, "/metrics")[1])
    return [sample for family in families for sample in family.samples]


def test_keys_of_every_route(guarded):
    for path in ("/dspark/stats", "/dspark/capabilities"):
        assert [call(guarded, path, key)[0] for key in (None, "wrong", "user-key")] == [401, 401, 200]
    switch = {"policy": "static", "verify_len": 2}
    assert [call(guarded, "/dspark/policy", key, switch)[0] for key in (None, "user-key")] == [401, 401]
    assert json.loads(call(guarded, "/dspark/stats", "user-key")[1])["policy"] == "auto"
    try:
        assert call(guarded, "/dspark/policy", "admin-key", switch)[0] == 200
        assert json.loads(call(guarded, "/dspark/stats", "user-key")[1])["policy"] == "static"
    finally:
        assert call(guarded, "/dspark/policy", "admin-key", {"policy": "auto"})[0] == 200


def test_only_the_dashboard_needs_no_key(guarded):
    status, page = call(guarded, "/dspark")
    assert status == 200
    assert 'data-needs-key="yes"' in page
    assert call(guarded, "/dspark/")[0] == 401
    assert call(guarded, "/dspark", body={})[0] == 401


def test_metrics_equal_the_statistics(guarded):
    for i in range(3):
        call(guarded, "/generate", "user-key", greedy([5 + i, 6, 7], 40))
    stats = json.loads(call(guarded, "/dspark/stats", "user-key")[1])
    totals = ("steps", "drafted_tokens", "verified_tokens", "accepted_tokens", "committed_tokens")
    expected = {f"sglang:dspark_{name}_total": stats[name] for name in totals}

    def sums(samples):
        return {name: sum(sample.value for sample in samples if sample.name == name) for name in expected}

    samples = eventually(lambda: exported(guarded), lambda samples: sums(samples) == expected)
    assert sums(samples) == expected
    labels = {sample.name: set(sample.labels) for sample in samples}
    assert labels["sglang:dspark_drafter_misfit"] == labels["sglang:gen_throughput"]
    assert labels["sglang:dspark_steps_total"] == labels["sglang:gen_throughput"] | {"load"}


def test_tokens_after_the_end_of_an_answer_are_not_counted(guarded):
    """A step may go beyond it, and under overlap another one has begun. The first token is that of a prefill."""
    assert call(guarded, "/dspark/policy", "admin-key", {"policy": "static"})[0] == 200
    try:
        before, kept = decoded_tokens(guarded), 0
        for body in (*(endless([5, 6, 7], length) for length in (2, 4, 7, 13)), greedy([5, 6, 7], 64)):
            answer = json.loads(call(guarded, "/generate", "user-key", body)[1])
            kept += answer["meta_info"]["completion_tokens"] - 1
    finally:
        assert call(guarded, "/dspark/policy", "admin-key", {"policy": "auto"})[0] == 200
    assert eventually(lambda: decoded_tokens(guarded) - before, lambda counted: counted >= kept) == kept > 0


def test_labels_that_the_metrics_do_not_have_count_for_nothing(guarded):
    """SGLang gives them to its metrics as they come, and would end with the first token."""
    for _ in range(2):
        assert call(guarded, "/generate", "user-key", greedy([5, 6, 7], 4, custom_labels={"город": "б"}))[0] == 200


def test_the_dashboard_asks_for_what_prometheus_gets(guarded):
    call(guarded, "/generate", "user-key", endless([5, 9, 6, 7], 300))
    newer = "application/openmetrics-text;version=1.0.0;escaping=allow-utf-8,text/plain;version=0.0.4;q=0.5"
    named = set(re.findall(r"sglang:\w+", GRAFANA.read_text()))

    def missing():
        request = urllib.request.Request(guarded.url + "/metrics", headers={"Accept": newer})
        with open_directly(request, timeout=60) as answer:
            families = list(text_string_to_openmetrics(answer.read().decode()))
        return named - {sample.name for family in families for sample in family.samples}

    assert eventually(missing, lambda names: not names) == set()


@pytest.mark.parametrize(
    ("policy", "options", "fewest", "most"),
    [
        ({"policy": "auto"}, {}, 0, 7),
        ({"policy": "static"}, {"max_verify": 2}, 2, 2),
        ({"policy": "off"}, {}, 0, 0),
    ],
    ids=["auto", "limit of a request", "off"],
)
def test_acceptance_is_that_of_verified_drafts(guarded, policy, options, fewest, most):
    """SGLang's metrics and log agree, whatever verifies ``fewest`` to ``most`` drafts a round."""
    assert call(guarded, "/dspark/policy", "admin-key", policy)[0] == 200
    try:
        # The last whole interval of the log has nothing of an earlier policy.
        body = endless([5, 9, 6, 7], 400 if most else 130, speculation=options)
        assert call(guarded, "/generate", "user-key", body)[0] == 200
    finally:
        call(guarded, "/dspark/policy", "admin-key", {"policy": "auto"})

    def told():
        found = {sample.name: sample.value for sample in exported(guarded)}
        lines = re.findall(r"accept len: (\S+), accept rate: (\S+), cap len: (\S+),", guarded.log_path.read_text())
        return [found[f"sglang:spec_{name}"] for name in ("accept_length", "accept_rate", "cap_length")], lines[-1]

    (length, rate, rows), logged = eventually(told, lambda told: told[1] == tuple(f"{value:.2f}" for value in told[0]))
    assert fewest <= rows - 1 <= most
    assert rate == pytest.approx((length - 1) / (rows - 1) if rows > 1 else 0)
    assert logged == (f"{length:.2f}", f"{rate:.2f}", f"{rows:.2f}")
    assert "block accept len" not in guarded.log_path.read_text()
    [load] = json.loads(call(guarded, "/v1/loads?include=all", "user-key")[1])["loads"]
    assert load["speculative"]["accept_rate"] == rate


def test_openai_answers_carry_the_counts_where_sglang_carries_meta_info(guarded):
    body = {"model": "m", "messages": [{"role": "user", "content": "a"}], "max_tokens": 16, "temperature": 0}
    body |= {"return_meta_info": True, "speculation": {"tpot_ms": 9999}}
    answer = json.loads(call(guarded, "/v1/chat/completions", "user-key", body)[1])
    meta_info = answer["choices"][0]["meta_info"]
    assert meta_info["dspark_slo"]["outcome"] == "met"
    counts = meta_info["dspark"]
    assert counts["accepted_tokens"] + counts["rounds"] >= answer["usage"]["completion_tokens"] - 1


@pytest.mark.thorough
def test_a_pause_is_not_the_time_of_a_step(guarded):
    def timed_s():
        return sum(s.value for s in exported(guarded) if s.name == "sglang:dspark_step_seconds_measured_total")

    time.sleep(1.5)  # metrics are brought up to date once in a second
    before, started, pause_s = timed_s(), time.monotonic(), 2.0
    body = endless([5, 6, 7], 900, speculation={"max_verify": 1})  # a pace would leave steps untimed
    request = in_background(lambda: call(guarded, "/generate", "user-key", body))
    time.sleep(0.3)
    assert call(guarded, "/pause_generation", "admin-key", {"mode": "in_place"})[0] == 200
    time.sleep(pause_s)
    assert request.is_alive()
    assert call(guarded, "/continue_generation", "admin-key", {})[0] == 200
    request.join()
    lasted_s = time.monotonic() - started
    time.sleep(1.5)
    assert 0 < timed_s() - before < lasted_s - 0.9 * pause_s


PROMPTS = [case["prompt_ids"] for case in CASES[:2]]


class LiteralDecoder:
    """Decodes with the golden target token by token, literal adjustments and a grammar of xgrammar's."""

    def __init__(self) -> None:
        self._model = AutoModelForCausalLM.from_pretrained(TARGET, dtype=torch.float32)
        tokenizer = AutoTokenizer.from_pretrained(TARGET)
        self._tokens = xgrammar.TokenizerInfo.from_huggingface(tokenizer, vocab_size=256, stop_token_ids=[1])

    @torch.inference_mode()
    def text(self, prompt: list[int], num_tokens: int, **parameters: Any) -> list[int]:
        matcher = None
        if "regex" in parameters:
            compiled = xgrammar.GrammarCompiler(self._tokens).compile_regex(parameters["regex"])
            matcher = xgrammar.GrammarMatcher(compiled)
        output: list[int] = []
        while len(output) < num_tokens and (not output or output[-1] != 1):
            logits = self._model(torch.tensor([[*prompt, *output]])).logits[0, -1].double().tolist()
            logits = literal_adjust(logits, adjustment(parameters), output)
            if matcher is not None:
                mask = xgrammar.allocate_token_bitmask(1, len(logits))
                matcher.fill_next_token_bitmask(mask)
                allowed = [mask[0, token // 32] >> (token % 32) & 1 for token in range(len(logits))]
                logits = [logit if ok else -math.inf for logit, ok in zip(logits, allowed, strict=True)]
            output.append(max(range(len(logits)), key=logits.__getitem__))
            assert matcher is None or matcher.accept_token(output[-1])
        return output


def adjustment(parameters: dict[str, Any]) -> Adjustment:
    """Return the adjustment that these sampling parameters ask for."""
    return Adjustment(
        frequency=parameters.get("frequency_penalty", 0),
        presence=parameters.get("presence_penalty", 0),
        repetition=parameters.get("repetition_penalty", 1),
        min_new_tokens=parameters.get("min_new_tokens", 0),
        stop_token_ids=(1,),
        logit_bias={int(token): bias for token, bias in parameters.get("logit_bias", {}).items()},
    )


TOGETHER: list[dict[str, Any]] = [
    {"frequency_penalty": 0.4, "presence_penalty": 0.6, "repetition_penalty": 1.3},
    {"frequency_penalty": -0.2, "repetition_penalty": 1.5, "min_new_tokens": 30, "logit_bias": {"1": 9.0, "26": 1.5}},
    {"regex": "(red|blue|cat|dog|small)+"},
    {"regex": "(red|blue|green|cat|dog|bird)+", "frequency_penalty": 0.7, "repetition_penalty": 1.2},
]


def test_everything_together_equals_a_literal_loop(dspark):
    """Penalties of all kinds at once, whose order the plain server leaves open, and grammars."""
    decoder = LiteralDecoder()
    bodies = [greedy(PROMPTS[0], 40, parameters) for parameters in ({}, *TOGETHER)]
    with policy(dspark, "random"):
        texts = output_ids(dspark, bodies, 6)
    for request, tokens in zip(bodies, texts, strict=True):
        parameters = {k: v for k, v in request["sampling_params"].items() if k in {key for t in TOGETHER for key in t}}
        assert tokens == decoder.text(request["input_ids"], 40, **parameters)


def test_seeded_text_under_adjustments_does_not_depend_on_policy_or_load(dspark):
    bodies = []
    for i, prompt in enumerate(PROMPTS * 3):
        regex = {"regex": "(red|blue|cat|dog|small)+"} if i % 2 else {}
        parameters = {"temperature": 1.5, "sampling_seed": i, "frequency_penalty": 0.5, **regex}
        bodies.append(greedy(prompt, 24, parameters))
    texts = []
    for name, concurrency in (("off", 1), ("random", 8)):
        with policy(dspark, name):
            texts.append(output_ids(dspark, bodies, concurrency))
    assert texts[0] == texts[1]
    assert len({tuple(text) for text in texts[0]}) > 4


def test_requests_with_features_are_drafted_too(dspark):
    """Nothing falls back to plain decoding."""
    with policy(dspark, "static"), counting(dspark) as counts:
        output_ids(dspark, [greedy(PROMPTS[0], 60, {"frequency_penalty": 0.01, "regex": ".*"})])
    assert 0 < counts["rounds"] < 60
    assert counts["accepted_tokens"] > counts["rounds"]
