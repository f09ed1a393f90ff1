"""`evaluate` against a stand-in whose rounds follow a known distribution, and in process on the golden pair."""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
from trace_server import GAMMA, ROUNDS_PER_ANSWER, STRETCH

from sglang_dspark.draft.reduced_vocabulary import save_token_ids
from sglang_dspark.tools.simulator.workload import RecordedBlocks

NUM_PROMPTS = 20


@pytest.fixture
def sets(tmp_path):
    """Two files of prompts."""
    paths = []
    for name in ("math", "chat"):
        path = tmp_path / f"{name}.jsonl"
        path.write_text("".join(json.dumps({"turns": [f"{name} {i}", "later"]}) + "\n" for i in range(NUM_PROMPTS)))
        paths += ["--prompts", path]
    return paths


def true_acceptance():
    """Mean of a sigmoid of N(1, 1.5): what the stand-in accepts a draft with."""
    logits = np.random.default_rng(0).normal(1.0, 1.5, size=1_000_000)
    return float((1 / (1 + np.exp(-logits))).mean())


@pytest.mark.slow
def test_everything_is_measured_and_written(run, server, sets, tmp_path):
    paths = {name: tmp_path / f"out.{name}" for name in ("json", "jsonl")}
    outputs = ["--output", paths["json"], "--blocks", paths["jsonl"]]
    result = run("evaluate", "--url", server.url, *sets, *outputs, "--temperature", 0.5)
    assert result.exit_code == 0, result.output

    content = json.loads(paths["json"].read_text())
    assert (content["target"], content["draft"]) == ("Target-1B", "draft-1b")
    assert content["protocol"] == {
        "max_tokens": 128,
        "temperature": 0.5,
        "limit": None,
        "shuffle_seed": None,
        "raw": False,
        "chat_template_kwargs": {},
    }
    assert [prompts["file"] for prompts in content["prompts"]] == ["math.jsonl", "chat.jsonl"]
    assert {"command", "commit", "versions", "hardware"} <= content.keys()
    assert [one["set"] for one in content["results"]] == ["math", "chat"]
    rate = true_acceptance()
    for one in content["results"]:
        assert one["rounds"] == NUM_PROMPTS * ROUNDS_PER_ANSWER
        expected = sum(rate**k for k in range(GAMMA + 1))
        assert one["accept_length"] == pytest.approx(expected, abs=5 * one["standard_error"])
        assert one["conditional"] == pytest.approx([rate] * GAMMA, abs=0.07)
        assert one["survival"][0] == pytest.approx(rate, abs=0.04)
        # The head's logits are stretched, so it is too sure of itself.
        assert min(row["ece"] for row in one["confidence"]) > 0.05

    blocks = RecordedBlocks.load(paths["jsonl"])
    assert len(blocks.accepted) == 2 * NUM_PROMPTS * ROUNDS_PER_ANSWER
    assert blocks.logits.std() == pytest.approx(1.5 * STRETCH, rel=0.05)
    asked = [body["messages"][0]["content"] for _, _, body in server.requests]
    assert sorted(asked) == sorted(f"{name} {i}" for name in ("math", "chat") for i in range(NUM_PROMPTS))
    assert {body["temperature"] for _, _, body in server.requests} == {0.5}


def test_a_chat_template_that_is_left_out_takes_no_arguments(run, server, sets):
    options = ("--raw", "--chat-template-kwargs", '{"enable_thinking": false}')
    result = run("evaluate", "--url", server.url, *sets, *options)
    assert result.exit_code == 2
    assert "--raw leaves the chat template out" in result.output
    result = run("evaluate", "--url", server.url, *sets, "--chat-template-kwargs", "[1]")
    assert result.exit_code == 2
    assert "'[1]' is not a JSON object" in result.output


def test_in_process_the_chat_template_gets_its_arguments(run, sets, target, draft, tmp_path):
    chat = Path(shutil.copytree(target, tmp_path / "chat", copy_function=shutil.copyfile))
    refusal = "{% if think is not defined %}{{ raise_exception('nobody said whether to think') }}{% endif %}"
    (chat / "chat_template.jinja").write_text(refusal + "{{ messages[0]['content'] }}")
    options = ("--target", chat, "--draft", draft, "--limit", 2, "--max-tokens", 12)
    silent = run("evaluate", *sets, *options)
    assert "nobody said whether to think" in str(silent.exception)
    result = run("evaluate", *sets, *options, "--chat-template-kwargs", '{"think": false}')
    assert result.exit_code == 0, result.output


def test_a_drafter_without_a_confidence_head(run, server, sets):
    server.has_head = False
    result = run("evaluate", "--url", server.url, *sets, "--limit", 5)
    assert result.exit_code == 0, result.output
    assert "given all before" in result.output
    assert "ECE" not in result.output


def test_a_server_that_does_not_verify_whole_blocks(run, server, sets):
    """Others that cannot be measured: test_calibrate.py."""
    server.verified = GAMMA - 1
    result = run("evaluate", "--url", server.url, *sets)
    assert result.exit_code == 1
    assert "start the server with --speculative-dspark-schedule static" in result.output


def test_in_process_with_and_without_the_markov_head(run, sets, target, draft, tmp_path):
    options = ("--target", target, "--draft", draft, "--raw", "--limit", 6, "--max-tokens", 16)
    result = run("evaluate", *sets, *options, "--output", tmp_path / "out.json")
    assert result.exit_code == 0, result.output
    results = json.loads((tmp_path / "out.json").read_text())["results"]
    assert [(one["set"], one["markov"]) for one in results] == [
        (name, markov) for name in ("math", "chat") for markov in (True, False)
    ]
    assert all(1 <= one["accept_length"] <= 8 and len(one["survival"]) == 7 for one in results)


def test_in_process_with_a_list_and_rounded_weights(run, sets, target, draft, tmp_path):
    save_token_ids(tmp_path / "list.json", range(0, 256, 2))
    options = ("--target", target, "--draft", draft, "--raw", "--limit", 6, "--max-tokens", 16)
    lean = ("--draft-vocabulary", tmp_path / "list.json", "--draft-quantization", "int8")
    result = run("evaluate", *sets, *options, *lean, "--output", tmp_path / "out.json")
    assert result.exit_code == 0, result.output
    found = json.loads((tmp_path / "out.json").read_text())
    keys = ("proposed_tokens", "quantization", "markov")
    rounds = {tuple(map(one.get, keys)): one["num_rounds"] for one in found["results"] if one["set"] == "math"}
    ways = [(proposed, form, True) for form in (None, "int8") for proposed in (128, 256)]
    assert rounds.keys() == {*ways, (128, None, False)}
    assert rounds[256, None, True] < rounds[128, None, True] and len({rounds[way] for way in ways}) == 4
    assert found["draft_vocabulary"][0]["file"] == "list.json"


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ((), "--target and --draft belong together"),
        (("--draft", "DRAFT", "--blocks", "x.jsonl"), "are for a server"),
        (("--draft", "DRAFT", "--temperature", 0.7), "in process it is 0 or 1"),
        (("--draft-quantization", "int8"), "a server has --speculative-dspark-draft-quantization"),
    ],
)
def test_options_that_do_not_go_together(run, sets, target, draft, options, says):
    in_process = () if "--draft-quantization" in options else ("--target", target)
    result = run("evaluate", *sets, *in_process, *(draft if value == "DRAFT" else value for value in options))
    assert result.exit_code == 2
    assert says in result.output
