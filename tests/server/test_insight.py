"""What a running server says of itself: statistics, Prometheus metrics, capabilities, and who may ask."""

from __future__ import annotations

import json
import re
import time
import urllib.error
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from golden_server import DRAFT, DSPARK, GUARDED, TARGET, greedy, output_ids, policy
from prometheus_client.parser import text_string_to_metric_families

from sglang_dspark import __version__
from sglang_dspark.http_client import open_directly

GRAFANA = Path(__file__).parents[2] / "docker" / "grafana" / "dspark.json"
PROMPTS = [[5 + i, 9, 20 + i, 7] for i in range(16)]


@pytest.fixture
def guarded(launch):
    return launch(*GUARDED)


def call(server, path, key=None, body=None):
    """Status and text of the answer to GET, or POST with a body."""
    headers = {"Content-Type": "application/json"} | ({"Authorization": f"Bearer {key}"} if key else {})
    data = None if body is None else json.dumps(body).encode()
    try:
        with open_directly(urllib.request.Request(server.url + path, data, headers), timeout=60) as response:
            return response.status, response.read().decode()
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode()


def test_statistics_add_up(dspark):
    before = dspark.get_json("/dspark/stats")
    texts = output_ids(dspark, [greedy(prompt, 48) for prompt in PROMPTS], 8)
    stats = dspark.get_json("/dspark/stats?history_s=60")
    # The first token of every text is the prefill's; what was drafted past the end of a text is committed, too.
    gained = sum(len(text) - 1 for text in texts)
    committed = stats["committed_tokens"] - before["committed_tokens"]
    assert gained <= committed <= gained + 7 * len(PROMPTS)
    assert stats["committed_tokens"] == stats["accepted_tokens"] + stats["rounds"]
    assert stats["wasted_tokens"] == stats["verified_tokens"] - stats["accepted_tokens"]
    k, tau = stats["verify_length"], stats["accept_length"]
    assert stats["wasted_verify_fraction"] == pytest.approx((k - (tau - 1)) / k)
    for key in ("steps", "rounds", "verified_tokens", "parked_steps"):
        assert stats[key] == sum(load[key] for load in stats["by_load"])
    assert stats["steps"] == sum(stats["steps_by_policy"].values())
    assert 1 <= stats["running_requests"] <= stats["max_running_requests"] == 16
    assert stats["occupancy"] == stats["running_requests"] / 16
    assert stats["measured_step_ms"] > 0 and stats["predicted_step_ms"] > 0
    observed, conditional = stats["survival"], stats["conditional_acceptance"]
    assert observed[0] == conditional[0]
    # Over the drafts that somebody predicted: fixed lengths, which other tests ask this server for, predict nothing.
    assert 0 < stats["predicted_survival"][0] < 1
    assert abs(stats["calibration_error"][0]) < 0.5
    recent = stats["recent"]
    assert recent["tokens_per_s"] == pytest.approx(recent["committed_tokens"] / recent["seconds"])
    assert 0 < sum(second["rounds"] for second in stats["history"]) <= stats["rounds"]


@pytest.mark.parametrize("seconds", ["-1", "301", "x"])
def test_spans_that_are_not_kept(dspark, seconds):
    status, text = call(dspark, f"/dspark/stats?history_s={seconds}")
    assert status == 400
    assert "history_s" in text


def test_steps_are_counted_under_the_policy_that_chose_them(dspark):
    with policy(dspark, "static", verify_len=1):
        before = dspark.get_json("/dspark/stats")
        output_ids(dspark, [greedy(PROMPTS[0], 16)])
        after = dspark.get_json("/dspark/stats")
    counts = [stats["steps_by_policy"].get("static", 0) for stats in (before, after)]
    assert counts[1] - counts[0] == after["steps"] - before["steps"] > 0


def test_capabilities(dspark):
    found = dspark.get_json("/dspark/capabilities")
    assert found["effective_decode_path"] == "dspark"
    assert found["versions"]["sglang"] == "0.5.15.post1"
    assert found["versions"]["sglang_dspark"] == __version__
    assert found["target"]["path"] == str(TARGET)
    drafter = found["drafter"]
    assert (drafter["path"], drafter["block_size"], drafter["confidence_head"]) == (str(DRAFT), 7, True)
    assert drafter["markov_head_type"] == "vanilla"
    assert drafter["vocab_size"] == found["target"]["vocab_size"]
    assert found["policy"] == "auto"
    assert {name for name, policy in found["policies"].items() if policy["available"]} == set(found["policies"])
    assert "trace" in found["features"]["speculation_fields"]
    assert found["features"]["attention_backend"] in ("torch_native", "triton")
    line = re.search(r"DSPARK: effective decode path dspark .*", dspark.log_path.read_text())
    assert line and "block size 7" in line[0] and "policy auto" in line[0]


def test_who_may_ask(guarded):
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


def test_the_page_alone_needs_no_key(guarded):
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


def test_a_damaged_drafter_with_a_fallback_is_the_target_alone(launch, plain, tmp_path):
    damaged = tmp_path / "drafter"
    damaged.mkdir()
    (damaged / "config.json").write_bytes((DRAFT / "config.json").read_bytes())
    (damaged / "model.safetensors").write_bytes((DRAFT / "model.safetensors").read_bytes()[:-1000])
    flags = [str(damaged) if flag == str(DRAFT) else flag for flag in DSPARK]
    server = launch(*flags, "--speculative-dspark-fallback", "target-only")
    found = server.get_json("/dspark/capabilities")
    assert found["effective_decode_path"] == "target-only"
    assert "model.safetensors: cannot be read" in found["reason"]
    assert "effective decode path target-only" in server.log_path.read_text()
    # What DSPARK refuses is served, as without the plugin.
    body = greedy([5, 6, 7], 12, return_logprob=True)
    assert server.post_json("/generate", body)["output_ids"] == plain.post_json("/generate", body)["output_ids"]
    for path, body in (("/dspark/stats", None), ("/dspark/policy", {"policy": "auto"})):
        status, text = call(server, path, body=body)
        assert status == 404
        assert "the target alone" in text
    assert call(server, "/dspark")[0] == 200


@pytest.mark.parametrize("stream", [False, True])
def test_every_answer_has_its_own_counts(dspark, stream):
    bodies = [greedy([5 + i, 9, 7], 32, stream=stream, speculation={"trace": True}) for i in range(4)]
    before = dspark.get_json("/dspark/stats")
    with ThreadPoolExecutor(4) as pool:
        answers = list(pool.map(lambda body: last_answer(dspark, body), bodies))
    after = dspark.get_json("/dspark/stats")
    counts = [answer["meta_info"]["dspark"] for answer in answers]
    for answer, count in zip(answers, counts, strict=True):
        meta = answer["meta_info"]
        rounds = [entry for entry in meta["dspark_trace"] if entry]
        assert count["drafted_tokens"] == sum(len(entry["draft"]) for entry in rounds)
        verified, accepted = (sum(entry[key] for entry in rounds) for key in ("verified", "accepted"))
        assert count["verified_tokens"] == verified == meta["spec_num_proposed_drafts"]
        assert count["accepted_tokens"] == accepted == meta["spec_num_correct_drafts"]
        assert count["rounds"] == len(rounds) == meta["spec_verify_ct"]
        assert meta["spec_accept_rate"] == count["accepted_tokens"] / count["verified_tokens"]
        assert min(meta["spec_accept_histogram"]) >= 0
        assert sum(meta["spec_accept_histogram"]) == count["rounds"]
    for key in ("rounds", "drafted_tokens", "verified_tokens", "accepted_tokens"):
        assert sum(count[key] for count in counts) == after[key] - before[key]


def last_answer(server, body):
    if not body["stream"]:
        return server.post_json("/generate", body)
    lines = call(server, "/generate", body=body)[1].split("\n\n")
    return json.loads([line for line in lines if line.startswith("data: {")][-1].removeprefix("data: "))


def test_openai_answers_carry_the_counts_where_sglang_carries_meta_info(guarded):
    body = {"model": "m", "messages": [{"role": "user", "content": "a"}], "max_tokens": 16, "temperature": 0}
    answer = json.loads(call(guarded, "/v1/chat/completions", "user-key", body | {"return_meta_info": True})[1])
    counts = answer["choices"][0]["meta_info"]["dspark"]
    assert counts["accepted_tokens"] + counts["rounds"] >= answer["usage"]["completion_tokens"] - 1
