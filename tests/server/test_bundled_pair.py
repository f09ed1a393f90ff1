"""Tests of the demo's pair on a real server: texts, ``evaluate``, statistics, capabilities and counts of answers.

A short form of ``benchmarks/identity.py``.
"""

from __future__ import annotations

import itertools
import json
import re
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner
from golden_server import DRAFT, TARGET, call, counting, greedy, last_answer, output_ids, policy, rounds_of
from transformers import AutoModelForCausalLM, AutoTokenizer

from sglang_dspark import __version__
from sglang_dspark.engine.support import installed_sglang
from sglang_dspark.scheduling.sps_table import SpsTable
from sglang_dspark.tools.cli import main
from sglang_dspark.tools.launch import LaunchedServer
from sglang_dspark.tools.simulator.workload import RecordedBlocks

NEAR_TIE = 1e-4  # gap of the target's two best logits below which the shape of a batch may decide
MAX_TOKENS = 16

PROMPTS = [
    "Write a Python function that reverses a linked list.",
    "A baker sells 12 loaves in the morning and twice as many in the afternoon. How many loaves is that?",
    "Explain to a child why the moon changes its shape.",
    "Name three uses of a paper clip.",
]


def answers(server: LaunchedServer, tokens: int = MAX_TOKENS, **fields: Any) -> list[dict[str, Any]]:
    """Return greedy answers to PROMPTS, all at once."""

    def ask(prompt: str) -> dict[str, Any]:
        body = {"text": chat(prompt), "sampling_params": {"temperature": 0, "max_new_tokens": tokens}, **fields}
        return dict(server.post_json("/generate", body))

    with ThreadPoolExecutor(len(PROMPTS)) as pool:
        return list(pool.map(ask, PROMPTS))


def chat(prompt: str) -> str:
    return f"<|im_start|>user\n{prompt}<|im_end|>\n<|im_start|>assistant\n"


@pytest.mark.thorough
def test_every_token_is_the_targets_choice(smollm2):
    """Transformers is the judge, with other batch shapes; the second pass is served from the radix cache."""
    path = smollm2.get_json("/dspark/capabilities")["target"]["path"]
    model, tokenizer = (
        AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32),
        AutoTokenizer.from_pretrained(path),
    )
    # ``static`` accepts a known share: ``auto`` may cut blocks short by step times taken on a busy machine.
    first, second = answers(smollm2), answers(smollm2)
    assert sum(answer["meta_info"]["cached_tokens"] for answer in second) > 10 * len(PROMPTS)
    assert smollm2.get_json("/dspark/stats")["accept_length"] > 1.4
    answered = zip(PROMPTS * 2, [*first, *second], strict=True)
    for prompt, *text in {(prompt, *answer["output_ids"]) for prompt, answer in answered}:  # mostly once each
        assert len(text) > 8
        assert largest_gap(model, tokenizer(chat(prompt)).input_ids, text) < NEAR_TIE


@pytest.mark.thorough
def test_a_drafter_in_four_bits(smollm2, smollm2_int4):
    """The text is the same, and about as many drafts are accepted as before the drafter was quantised."""
    texts, lengths = [], []
    for server in (smollm2, smollm2_int4):
        found = answers(server, 3 * MAX_TOKENS, speculation={"preset": "none"})  # only the drafter's drafts
        texts.append([answer["output_ids"] for answer in found])
        counts = [answer["meta_info"] for answer in found]
        steps = sum(count["spec_verify_ct"] for count in counts)
        lengths.append(sum(count["completion_tokens"] for count in counts) / steps)
    assert texts[0] == texts[1]
    assert lengths[0] > 1.4 and 0.85 < lengths[1] / lengths[0] < 1.15


HARD = [
    "qzxv 83#jf &&k2 w0wq ptlk 9981 zzkq",
    "Переведи на русский: the cat sat on the mat.",
    "0x4f 0x1c 0x99 0xab 0x00 0x7e 0x13",
    "Nenne drei Städte in Österreich und eine in der Schweiz.",
]


@pytest.mark.thorough
def test_hard_prompts_raise_no_alarm(smollm2):
    """Noise, other languages and numbers, also sampled hot: the drafter was trained on nothing of it."""
    for temperature in (0, 1.5):
        parameters = {"temperature": temperature, "max_new_tokens": 3 * MAX_TOKENS, "ignore_eos": True}
        smollm2.post_json("/generate", {"text": [chat(prompt) for prompt in HARD], "sampling_params": parameters})
    assert smollm2.get_json("/dspark/stats")["drafter_fit"]["verdict"] == "fits"


@torch.inference_mode()
def largest_gap(model: Any, prompt: list[int], output: list[int]) -> float:
    """Return the largest gap between the best logit and that of the chosen token."""
    logits = model(torch.tensor([prompt + output])).logits[0, len(prompt) - 1 : -1]
    chosen = logits.gather(1, torch.tensor(output)[:, None])[:, 0]
    return float((logits.max(dim=1).values - chosen).max())


EVALUATED_TOKENS, GAMMA = 40, 7
FIRST, SECOND = ("red", "old", "quick"), ("cat", "river", "lamp", "bird")


def test_accept_length_agrees_with_the_counters(dspark, tmp_path):
    prompts, output, blocks = (tmp_path / name for name in ("set.jsonl", "out.json", "blocks.jsonl"))
    texts = [f"{first} {second} sees the {second}" for first, second in itertools.product(FIRST, SECOND)]
    prompts.write_text("".join(json.dumps({"turns": [text]}) + "\n" for text in texts))
    options = ["--url", dspark.url, "--prompts", str(prompts), "--raw", "--temperature", "1"]
    options += ["--max-tokens", str(EVALUATED_TOKENS), "--output", str(output), "--blocks", str(blocks)]
    with policy(dspark, "static"), counting(dspark) as counts:
        result = CliRunner().invoke(main, ["evaluate", *options])
    assert result.exit_code == 0, result.output
    [measured] = json.loads(output.read_text())["results"]
    rounds, committed, accepted = (counts[key] for key in ("rounds", "committed_tokens", "accepted_tokens"))
    assert measured["rounds"] == rounds
    # The counters know nothing of stop tokens: what follows one in a block, and a bonus after it, they count.
    most_more = len(texts) * (GAMMA + 1)
    assert 0 <= committed - round(measured["accept_length"] * rounds) <= most_more
    assert accepted >= round(measured["survival"][0] * rounds)
    assert len(RecordedBlocks.load(blocks).accepted) <= rounds
    assert len(measured["confidence"]) == GAMMA


STATISTICS = Path(__file__).parents[2] / "docs" / "statistics.md"
INSIGHT_PROMPTS = [[5 + i, 9, 20 + i, 7] for i in range(16)]


def test_statistics_add_up(dspark):
    with policy(dspark, "threshold", confidence_threshold=0.1), counting(dspark) as counts:
        texts = output_ids(dspark, [greedy(prompt, 48) for prompt in INSIGHT_PROMPTS], 8)
    output_ids(dspark, [greedy(prompt, 24) for prompt in INSIGHT_PROMPTS[:4]], 4)  # what ``auto`` knows
    stats = dspark.get_json("/dspark/stats")
    # The first token of every text is the prefill's; drafts that were accepted past the end of a text are committed.
    gained = sum(len(text) - 1 for text in texts)
    assert gained <= counts["committed_tokens"] <= gained + 7 * len(INSIGHT_PROMPTS)
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
    assert stats["policy"] == "auto"
    assert len(stats["schedule"]["lagged_survival"]) == len(stats["calibration"]["scale"]) == 7
    step_time = stats["schedule"]["step_time"]
    assert min(stats["schedule"]["expected_tokens_per_s"], step_time["measured_ms"], step_time["predicted_ms"]) > 0
    if not torch.cuda.is_available():
        assert min(step_time["host_ms"].values()) > 0


def test_statistics_have_the_keys_that_are_documented(dspark):
    table = STATISTICS.read_text().split("| field |", 1)[1].split("\n\n", 1)[0]
    rows = [re.findall(r"`(\w+)`", line.split("|")[1]) for line in table.splitlines()[2:]]
    unused = {"prompts", "drafts_beside_prompts"}  # of features that this server does not use
    assert dspark.get_json("/dspark/stats").keys() == {*itertools.chain(*rows)} - unused


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
            output_ids(dspark, [greedy(prompt, 24) for prompt in INSIGHT_PROMPTS[:4]], 4)
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
    assert (found["features"]["prefill_attention"] == "sdpa_tiles") == on_cpu
    assert found["features"]["decode_attention"] == ("sdpa_tiles" if on_cpu else "window_attention")
    assert not (on_cpu and found["features"]["prefill_cuda_graphs"])
    line = re.search(r"DSPARK: effective decode path dspark .*", dspark.log_path.read_text())
    assert line and "block size 7" in line[0] and "policy auto" in line[0]


@pytest.mark.thorough
def test_a_damaged_drafter_with_a_fallback_serves_without_drafts(target_only, plain):
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
