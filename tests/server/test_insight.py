"""Statistics and capabilities of a running server, and the counts of every answer."""

from __future__ import annotations

import itertools
import re
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from golden_server import DRAFT, TARGET, call, counting, greedy, last_answer, output_ids, policy, rounds_of

from sglang_dspark import __version__
from sglang_dspark.engine.support import installed_sglang
from sglang_dspark.scheduling.sps_table import SpsTable

STATISTICS = Path(__file__).parents[2] / "docs" / "statistics.md"
PROMPTS = [[5 + i, 9, 20 + i, 7] for i in range(16)]


def test_statistics_add_up(dspark):
    with policy(dspark, "threshold", confidence_threshold=0.1), counting(dspark) as counts:
        texts = output_ids(dspark, [greedy(prompt, 48) for prompt in PROMPTS], 8)
    stats = dspark.get_json("/dspark/stats")
    # The first token of every text is the prefill's; drafts that were accepted past the end of a text are committed.
    gained = sum(len(text) - 1 for text in texts)
    assert gained <= counts["committed_tokens"] <= gained + 7 * len(PROMPTS)
    assert stats["committed_tokens"] == stats["accepted_tokens"] + stats["rounds"]
    k, tau = stats["verify_length"], stats["accept_length"]
    assert stats["wasted_verify_fraction"] == pytest.approx((k - (tau - 1)) / k)
    for key in ("steps", "rounds", "verified_tokens", "parked_steps"):
        assert stats[key] == sum(load[key] for load in stats["by_load"])
    assert stats["steps"] == sum(stats["steps_by_policy"].values())
    assert 1 <= stats["running_requests"] <= 16
    assert 0 < stats["timed_steps"] <= stats["steps"]
    assert stats["measured_step_ms"] > 0 and stats["predicted_step_ms"] > 0
    observed, conditional = stats["survival"], stats["conditional_acceptance"]
    assert observed[0] == conditional[0]
    # Only of drafts with a prediction: fixed lengths, which other tests ask this server for, predict nothing.
    assert 0 < stats["predicted_survival"][0] < 1
    assert abs(stats["calibration_error"][0]) < 0.5


def test_statistics_have_the_keys_that_are_documented(dspark):
    table = STATISTICS.read_text().split("| field |", 1)[1].split("\n\n", 1)[0]
    rows = [re.findall(r"`(\w+)`", line.split("|")[1]) for line in table.splitlines()[2:]]
    unused = {"prompts", "drafts_beside_prompts"}  # of features that this server does not use
    assert dspark.get_json("/dspark/stats").keys() == {*itertools.chain(*rows)} - unused


def test_auto_reports_what_it_knows(dspark):
    output_ids(dspark, [greedy(prompt, 48) for prompt in PROMPTS], 8)
    stats = dspark.get_json("/dspark/stats")
    assert stats["policy"] == "auto"
    schedule = stats["schedule"]
    assert schedule["expected_tokens_per_s"] > 0
    assert len(schedule["lagged_survival"]) == 7
    assert schedule["step_time"]["measured_ms"] > 0
    assert schedule["step_time"]["predicted_ms"] > 0
    if not torch.cuda.is_available():
        assert min(schedule["step_time"]["host_ms"].values()) > 0
    assert len(stats["calibration"]["scale"]) == 7


def test_step_times_are_kept_where_the_option_says(dspark):
    """Measured by this start, or by one before with the same file."""
    [path] = re.findall(r"DSPARK: step times (?:written to|from) (\S+)", dspark.log_path.read_text())
    assert Path(path).name == "step_times.json"
    table = SpsTable.load(Path(path))
    assert (table.drafts[-1], table.requests[0]) == (7, 1)


def test_steps_are_counted_under_the_policy_that_chose_them(dspark):
    with policy(dspark, "static", verify_len=2):
        before = dspark.get_json("/dspark/stats")["steps_by_policy"].get("static", 0)
        with counting(dspark) as counts:
            output_ids(dspark, [greedy(prompt, 24) for prompt in PROMPTS[:4]], 4)
        assert dspark.get_json("/dspark/stats")["steps_by_policy"]["static"] - before == counts["steps"] > 0
    assert counts["verified_tokens"] == 2 * counts["rounds"] > 0


def test_capabilities(dspark):
    found = dspark.get_json("/dspark/capabilities")
    assert found["effective_decode_path"] == "dspark"
    assert found["versions"]["sglang"] == installed_sglang()
    assert found["versions"]["sglang_dspark"] == __version__
    assert (found["target"]["path"], found["target"]["recurrence"]) == (str(TARGET), None)
    drafter = found["drafter"]
    assert (drafter["path"], drafter["block_size"], drafter["confidence_head"]) == (str(DRAFT), 7, True)
    assert drafter["markov_head_type"] == "vanilla"
    assert drafter["vocab_size"] == found["target"]["vocab_size"]
    assert found["policy"] == "auto"
    assert {name for name, policy in found["policies"].items() if policy["available"]} == set(found["policies"])
    assert "trace" in found["features"]["speculation_fields"]
    on_cpu = found["device"] == "cpu"
    assert (found["features"]["prefill_attention"] == "torch_native") == on_cpu
    assert found["features"]["decode_attention"] == ("grouped SDPA" if on_cpu else "window_attention")
    assert not (on_cpu and found["features"]["prefill_cuda_graphs"])
    line = re.search(r"DSPARK: effective decode path dspark .*", dspark.log_path.read_text())
    assert line and "block size 7" in line[0] and "policy auto" in line[0]


def test_a_damaged_drafter_with_a_fallback_is_the_target_alone(target_only, plain):
    server = target_only
    found = server.get_json("/dspark/capabilities")
    assert found["effective_decode_path"] == "target-only"
    assert "model.safetensors: cannot be read" in found["reason"]
    assert "effective decode path target-only" in server.log_path.read_text()
    # What DSPARK refuses is served, as without the plugin.
    body = greedy([5, 6, 7], 12, return_logprob=True)
    assert server.post_json("/generate", body)["output_ids"] == plain.post_json("/generate", body)["output_ids"]
    for path, body in (("/dspark/stats", None), ("/dspark/policy", {"policy": "auto"})):
        assert call(server, path, body=body)[0] == 404
    assert call(server, "/dspark")[0] == 200


@pytest.mark.parametrize("stream", [False, True])
def test_every_answer_has_its_own_counts(dspark, stream):
    bodies = [greedy([5 + i, 9, 7], 32, stream=stream, speculation={"trace": True}) for i in range(4)]
    with policy(dspark, "static"), counting(dspark) as sums, ThreadPoolExecutor(4) as pool:
        answers = list(pool.map(lambda body: last_answer(dspark, body), bodies))
    counts = [answer["meta_info"]["dspark"] for answer in answers]
    for answer, count in zip(answers, counts, strict=True):
        meta = answer["meta_info"]
        rounds = rounds_of(answer)
        assert count["drafted_tokens"] == sum(len(entry["draft"]) for entry in rounds)
        verified, accepted = (sum(entry[key] for entry in rounds) for key in ("verified", "accepted"))
        assert count["verified_tokens"] == verified == meta["spec_num_proposed_drafts"]
        assert count["accepted_tokens"] == accepted == meta["spec_num_correct_drafts"]
        assert count["rounds"] == len(rounds) == meta["spec_verify_ct"]
        assert meta["spec_accept_rate"] == count["accepted_tokens"] / count["verified_tokens"]
        assert min(meta["spec_correct_drafts_histogram"]) >= 0
        assert sum(meta["spec_correct_drafts_histogram"]) == count["rounds"]
    for key in ("rounds", "drafted_tokens", "verified_tokens", "accepted_tokens"):
        assert sum(count[key] for count in counts) == sums[key]


@pytest.mark.parametrize("preset", ["auto", "summarization"])
def test_places_that_were_copied_are_not_the_drafters(letters, preset):
    """Blocks have 15 places, of which the drafter proposes 7: the others, and what a preset copies, are not its own."""
    body = greedy([*range(5, 25)] * 3, 48, speculation={"trace": True, "preset": preset})
    with policy(letters, "static"), counting(letters) as sums:
        answer = letters.post_json("/generate", body)
    rounds, counts = rounds_of(answer), answer["meta_info"]["dspark"]
    most = sum(min(7, len(entry["draft"])) for entry in rounds)
    assert max(len(entry["draft"]) for entry in rounds) == 15
    assert counts["drafted_tokens"] == sums["drafted_tokens"]
    assert (counts["drafted_tokens"] < most) == (sums["copied_tokens"] > 0) == (preset == "summarization")
    assert sums["drafted_tokens"] + sums["copied_tokens"] >= most
    assert preset != "auto" or counts["drafted_tokens"] == most
