"""A server with keys and metrics: which routes need which key, and what Prometheus and OpenAI clients get."""

from __future__ import annotations

import json
import re
import time
from pathlib import Path

from golden_server import call, endless, greedy, in_background
from prometheus_client.parser import text_string_to_metric_families

GRAFANA = Path(__file__).parents[2] / "docker" / "grafana" / "dspark.json"


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


def test_the_dashboard_alone_needs_no_key(guarded):
    status, page = call(guarded, "/dspark")
    assert status == 200
    assert 'data-needs-key="yes"' in page
    assert call(guarded, "/dspark/")[0] == 401
    assert call(guarded, "/dspark", body={})[0] == 401


def test_metrics_equal_the_statistics(guarded):
    for i in range(3):
        call(guarded, "/generate", "user-key", greedy([5 + i, 6, 7], 40))
    stats = json.loads(call(guarded, "/dspark/stats", "user-key")[1])
    totals = ("steps", "drafted_tokens", "verified_tokens", "accepted_tokens", "wasted_tokens", "committed_tokens")
    expected = {f"sglang:dspark_{name}_total": stats[name] for name in totals}
    deadline = time.monotonic() + 10
    while True:
        text = call(guarded, "/metrics")[1]
        samples = [sample for family in text_string_to_metric_families(text) for sample in family.samples]
        found = {name: sum(sample.value for sample in samples if sample.name == name) for name in expected}
        if found == expected or time.monotonic() > deadline:
            break
        time.sleep(0.3)
    assert found == expected
    labels = {sample.name: set(sample.labels) for sample in samples}
    assert labels["sglang:dspark_accept_length"] == labels["sglang:gen_throughput"]
    assert labels["sglang:dspark_steps_total"] == labels["sglang:gen_throughput"] | {"load"}
    named = set(re.findall(r"sglang:\w+", GRAFANA.read_text()))
    assert named - labels.keys() == set()


def test_openai_answers_carry_the_counts_where_sglang_carries_meta_info(guarded):
    body = {"model": "m", "messages": [{"role": "user", "content": "a"}], "max_tokens": 16, "temperature": 0}
    answer = json.loads(call(guarded, "/v1/chat/completions", "user-key", body | {"return_meta_info": True})[1])
    counts = answer["choices"][0]["meta_info"]["dspark"]
    assert counts["accepted_tokens"] + counts["rounds"] >= answer["usage"]["completion_tokens"] - 1


def test_a_pause_is_not_the_time_of_a_step(guarded):
    def timed_s():
        samples = (s for family in text_string_to_metric_families(call(guarded, "/metrics")[1]) for s in family.samples)
        return sum(s.value for s in samples if s.name == "sglang:dspark_step_seconds_measured_total")

    time.sleep(1.5)  # metrics are brought up to date once in a second
    before, started, pause_s = timed_s(), time.monotonic(), 2.0
    body = endless([5, 6, 7], 400)
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
