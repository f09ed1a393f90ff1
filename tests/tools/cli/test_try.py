"""`doctor --try`: two servers and what is made of their answers, judged texts, and a report that gives nothing away."""

import json
import math
import platform
from pathlib import Path

import pytest
import torch
from letter_tokenizers import save_byte_tokenizer
from rich.console import Console

from sglang_dspark.errors import ConfigError
from sglang_dspark.tools import provenance, trial
from sglang_dspark.tools.cli import serve as command
from sglang_dspark.tools.doctor import Finding
from sglang_dspark.tools.trial import Trial, grouped, judged, named_prompts


@pytest.fixture
def run_try(run, monkeypatch, tmp_path):
    """``run_try(*arguments)`` tries without the checks before, and returns the command's result and the report."""
    monkeypatch.setattr(command, "_CACHE", tmp_path / "cache")
    monkeypatch.setattr(command, "_diagnose", lambda *pair, **asked: iter(()))

    def run_it(*arguments):
        result = run("doctor", "--try", "--report", tmp_path / "report.json", *arguments)
        return result, json.loads((tmp_path / "report.json").read_text())

    return run_it


@pytest.fixture
def stand_in(stub_sglang, monkeypatch, tmp_path):
    """``stand_in(behaviour)`` has the tiny pair's folder say how the stub behaves."""

    def behave(behaviour):
        monkeypatch.setattr(trial, "write_tiny_pair", lambda folder: (tmp_path / behaviour, tmp_path / "draft"))

    return behave


def answer(ids, *top):
    """An answer of the plain server; ``top`` has the likeliest tokens of each position, with log-probabilities."""
    listed = [[[logprob, token, None] for token, logprob in place] for place in top]
    return {"output_ids": ids, "meta_info": {"output_top_logprobs": listed}}


TOP = ([(5, -0.5), (6, -0.7)], [(7, -0.1), (8, -2.5)])


@pytest.mark.parametrize(
    ("ids", "counted", "tokens", "splits"),
    [
        ([5, 7], "equal", 2, []),
        ([6, 7], "near_tie", 0, [{"text": 0, "position": 0, "gap": 0.2}]),
        ([5, 8], "different", 1, [{"text": 0, "position": 1, "gap": 2.4}]),
        ([5, 9], "different", 1, [{"text": 0, "position": 1, "gap": None}]),
        ([5], "different", 1, [{"text": 0, "position": 1, "gap": None}]),
    ],
    ids=["equal", "near-tie", "second best by far", "unlikely", "ends early"],
)
def test_texts_are_judged(ids, counted, tokens, splits):
    found = judged([answer([5, 7], *TOP)], [ids], 0.25)
    assert {name: found[name] for name in ("equal", "near_tie", "different")} == {
        name: int(name == counted) for name in ("equal", "near_tie", "different")
    }
    assert (found["tokens"], found["splits"]) == (tokens, splits)


def test_in_float32_nothing_is_a_near_tie():
    assert judged([answer([5, 7], *TOP)], [[6, 7]], 0.0)["different"] == 1


def test_flags_go_to_the_servers_that_know_them(tmp_path, monkeypatch):
    flags = (
        *("--dtype", "float16", "--speculative-dspark-schedule", "static", "--cuda-graph-bs", "1", "2"),
        *("--speculative-dspark-unproven=held-rows", "--host", "0.0.0.0", "--api-key", "hush", "--port", "1"),
    )
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    tried = Trial(Console(), None, flags, log_dir=tmp_path)
    assert tried._ours == ["--speculative-dspark-schedule", "static", "--speculative-dspark-unproven=held-rows"]
    kept = ["--dtype", "float16", "--cuda-graph-bs", "1", "2"]
    assert tried._common == [*trial.GPU_FLAGS, "--dtype", "bfloat16", "--skip-tokenizer-init", *kept]
    assert tried.report["flags"] == [
        "--dtype float16",
        "--speculative-dspark-schedule static",
        "--cuda-graph-bs 1 2",
        "--speculative-dspark-unproven held-rows",
    ]


@pytest.mark.parametrize(
    ("words", "shown"),
    [
        (["--max-running-requests", "8"], "--max-running-requests 8"),
        (["--served-model-name", "secret"], "--served-model-name ..."),
        (["--tokenizer-path=/home/me/secret"], "--tokenizer-path ..."),
        (["--dist-init-addr", "node:20000"], "--dist-init-addr ..."),
        (["--json-model-override-args", '{"a": "b"}'], "--json-model-override-args ..."),
        (["--enable-mixed-chunk"], "--enable-mixed-chunk"),
    ],
)
def test_a_flag_is_shown_without_what_may_be_private(words, shown):
    assert provenance.shown_flag(words) == shown


def test_a_report_names_no_folder_and_no_machine(monkeypatch):
    monkeypatch.setattr(platform, "node", lambda: "alpha7")
    said = {
        "lines": [
            'File "/home/me/x/sglang/srt/run.py", line 5, in <module>',
            "OSError: ../mine/model-9/config.json on alpha7, ~/cache or http://127.0.0.1:15000/generate: 1/8, and/or",
            "/data/model is missing",
        ],
        "number": 3.5,
    }
    assert provenance.without_names(said, {"/data/model": "TARGET"}) == {
        "lines": [
            'File "run.py", line 5, in <module>',
            "OSError: config.json on HOST, cache or http://127.0.0.1:15000/generate: 1/8, and/or",
            "TARGET is missing",
        ],
        "number": 3.5,
    }


def test_prompts_of_a_named_target(tmp_path):
    """In its chat template if it has one."""
    chat, plain = save_byte_tokenizer(tmp_path / "chat"), save_byte_tokenizer(tmp_path / "plain")
    (plain / "chat_template.jinja").unlink()
    chats, texts = named_prompts(chat), named_prompts(plain)
    assert len(chats) == len(texts) == 20
    assert all(len(one) - len(other) == len("u:;a:") for one, other in zip(chats, texts, strict=True))
    with pytest.raises(ConfigError, match="--try needs its tokenizer"):
        named_prompts(tmp_path)


def test_equal_texts(run_try, stand_in):
    stand_in("serves")
    result, report = run_try()
    assert result.exit_code == 0, result.output
    assert "No text is different." in result.output
    assert "12 kernels agree with PyTorch in 34 forms, and 5 CUDA graphs with eager steps" in result.output
    assert report["report"] == trial.KIND
    assert {policy: found["equal"] for policy, found in report["texts"].items()} == {"static": 20, "auto": 20}
    assert report["texts"]["auto"]["verified_tokens"] == 20 * 9
    assert report["users"] is None


def test_a_trial_without_drafts_fails(run_try, stand_in):
    stand_in("plain")
    result, report = run_try()
    assert result.exit_code == 1
    assert "no draft was verified" in result.output
    assert report["texts"]["auto"]["equal"] == 20


def test_a_different_text_ends_with_status_1(run_try, stand_in):
    stand_in("differs")
    result, report = run_try("--", "--served-model-name", "secret")
    assert result.exit_code == 1
    assert "Texts are different." in result.output
    assert report["texts"]["static"]["different"] == 20
    assert "secret" not in json.dumps(report)


def test_a_server_that_does_not_start_is_reported(run_try, stand_in, tmp_path):
    stand_in("die")
    result, report = run_try()
    assert result.exit_code == 1
    assert "Error: the server ended with exit status 1" in result.output
    assert report["error"] == {"server": "plain", "lines": ["no such model"]}
    assert report["texts"] is None
    assert str(tmp_path) not in json.dumps(report)


def test_nothing_is_tried_where_a_check_fails(run, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(command, "_diagnose", lambda *pair, **asked: iter([Finding("fail", "device", "none")]))
    result = run("doctor", "--try")
    assert (result.exit_code, list(tmp_path.iterdir())) == (1, [])


def test_a_report_of_no_trial_is_refused(run, tmp_path):
    result = run("doctor", "--report", tmp_path / "report.json")
    assert result.exit_code == 2
    assert "give --try, too" in result.output


def test_words_belong_to_the_flag_before_them():
    assert grouped(["--a", "1", "2", "--b=3", "--c"]) == [["--a", "1", "2"], ["--b=3"], ["--c"]]


@pytest.mark.slow
@pytest.mark.thorough
def test_the_tiny_pair_on_this_machine(run_try, tmp_path):
    """Drafts are kept and rejected, and texts are equal, on a CPU exactly."""
    result, report = run_try("--", "--mem-fraction-static", "0.9")
    assert result.exit_code == 0, result.output
    for policy in ("static", "auto"):
        found = report["texts"][policy]
        assert found["different"] == 0
        if not torch.cuda.is_available():
            assert (found["equal"], found["tokens"]) == (20, 20 * trial.MAX_TOKENS)
    found = report["texts"]["static"]
    assert 1.5 < found["committed_tokens"] / found["rounds"] < 7
    assert found["accepted_tokens"] < found["verified_tokens"]
    reached = [point["users"] for point in report["users"]]  # on a slow machine, large steps are not timed
    assert reached == list(trial.USERS[: len(reached)])
    assert reached[-1] <= report["server"]["max_running_requests"]
    assert all(math.isfinite(figure) and figure > 0 for point in report["users"] for figure in point.values())
    assert (len(reached) < len(trial.USERS)) == ("Nothing is said about" in result.output)
    written = (tmp_path / "report.json").read_text()
    assert [name for name in (str(tmp_path), "/tmp", str(Path.home()), platform.node()) if name in written] == []
    assert "input_ids" not in written
