"""A whole sweep over servers without a model."""

import json
import subprocess
import sys
from itertools import pairwise

import pandas as pd
import psutil
import pytest
import sweep_concurrency
from click.testing import CliRunner
from fake_engine import FakeEngine, served
from serving.row import COLUMNS


class FakeServer:
    """A sleeping process group that stands for a server; the engine in this process answers for it."""

    url, log_path = "", "server.log"
    flags_seen, pids, policies = [], [], []

    def __init__(self, target, *flags, env=None):
        self.flags_seen.append(flags)
        self._rounds = 0

    def __enter__(self):
        program = [sys.executable, "-c", "import time; time.sleep(600)"]
        self._process = subprocess.Popen(program, start_new_session=True)
        self.pid = self._process.pid
        self.pids.append(self.pid)
        return self

    def __exit__(self, *error):
        self._process.kill()
        self._process.wait()

    def get_json(self, path):
        assert path == "/dspark/stats"
        self._rounds += 2
        others = ("drafted_tokens", "verified_tokens", "accepted_tokens", "steps", "plain_steps")
        counts = dict.fromkeys(others, 7 * self._rounds)
        return counts | {"rounds": self._rounds, "committed_tokens": 3 * self._rounds}

    def post_json(self, path, body):
        assert path == "/dspark/policy"
        self.policies.append(body)

    def log_tail(self):
        return "last words"


@pytest.fixture
def sweep(tmp_path, monkeypatch):
    """Runs a sweep with the given options; returns click's result and the folder of results."""
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text("".join(json.dumps({"turns": [f"prompt [{index}]"]}) + "\n" for index in range(9)))
    monkeypatch.setattr(sweep_concurrency, "LaunchedServer", FakeServer)
    monkeypatch.setattr(sweep_concurrency.signal, "signal", lambda *_: None)
    monkeypatch.setattr(FakeServer, "flags_seen", [])
    monkeypatch.setattr(FakeServer, "pids", [])
    monkeypatch.setattr(FakeServer, "policies", [])

    def run(*options):
        with served(FakeEngine()) as url:
            monkeypatch.setattr(FakeServer, "url", url)
            arguments = ["--target", "folder/target", "--prompts", str(prompts), "--output", str(tmp_path / "out")]
            return CliRunner().invoke(sweep_concurrency.main, [*arguments, *options]), tmp_path / "out"

    return run


def test_sweep_writes_every_cell(sweep):
    configs = ("--config", "plain", "--config", "static:3", "--draft", "folder/draft")
    result, output = sweep(*configs, "--concurrency", "1,2", "--rounds", "2", "--num-prompts", "4")
    assert result.exit_code == 0, result.output

    frame = pd.read_csv(output / "sweep.csv")
    assert tuple(frame.columns) == COLUMNS
    assert list(zip(frame["config"], frame["concurrency"], frame["round"], strict=True)) == [
        *(("plain@bfloat16", 1, 0), ("static:3@bfloat16", 1, 0), ("static:3@bfloat16", 2, 0), ("plain@bfloat16", 2, 0)),
        *(("static:3@bfloat16", 1, 1), ("plain@bfloat16", 1, 1), ("plain@bfloat16", 2, 1), ("static:3@bfloat16", 2, 1)),
    ]
    assert (frame["num_tokens"] == 12).all() and (frame["draft"] == "draft").all()
    speculative = frame[frame["policy"] == "static"]
    assert (speculative["decode_rounds"] == 2).all() and (speculative["accept_length"] == 3.0).all()
    assert frame[frame["policy"] == "plain"]["drafted"].isna().all()

    requests = [json.loads(line) for line in (output / "requests.jsonl").read_text().splitlines()]
    asked = {(r["config"], r["concurrency"], r["round"], r["slot"]): r["prompt_index"] for r in requests}
    assert [asked["plain@bfloat16", 2, 1, slot] for slot in range(4)] == [4, 5, 6, 7]
    agreements = json.loads((output / "agreement.json").read_text())["agreements"]
    assert len(agreements) == 3 and all(a["share"] == 1.0 and a["compared"] == 8 for a in agreements)
    record = json.loads((output / "provenance.json").read_text())
    assert record["finished"] and record["commit"] == frame["commit"][0]
    assert "static:3@bfloat16" in result.output and "output_tok_s: ratio" in result.output
    assert len(FakeServer.pids) == 2 and not any(psutil.pid_exists(pid) for pid in FakeServer.pids)


def test_policies_share_a_server_and_are_switched_before_each_cell(sweep):
    configs = ("--config", "static:3", "--config", "threshold:0.5", "--config", "auto", "--config", "plain")
    result, _ = sweep(*configs, "--draft", "folder/draft", "--concurrency", "2", "--rounds", "1")
    assert result.exit_code == 0, result.output
    assert len(FakeServer.pids) == 2
    assert not any("schedule" in flag for flags in FakeServer.flags_seen for flag in flags)
    policies = {"policy": "static", "verify_len": 3}, {"policy": "threshold", "confidence_threshold": 0.5}
    # The last configuration starts the warm-up round, the first one the recorded round.
    assert FakeServer.policies == 2 * [*policies, {"policy": "auto"}]


def test_sampled_texts_are_not_compared(sweep):
    options = ("--config", "plain", "--config", "again=plain", "--temperature", "1")
    result, output = sweep(*options, "--concurrency", "1", "--rounds", "1", "--num-prompts", "1")
    assert result.exit_code == 0, result.output
    assert json.loads((output / "agreement.json").read_text()) == {"agreements": []}


def test_server_admits_all_users(sweep):
    sweep("--config", "plain", "--concurrency", "20", "--rounds", "1", "--num-prompts", "20")
    (flags,) = FakeServer.flags_seen
    values = [value for flag, value in pairwise(flags) if flag == "--max-running-requests"]
    assert values[-1] == "20"  # the last one counts


@pytest.mark.parametrize(
    ("options", "complaint"),
    [
        (("--config", "static:3"), "--draft"),
        (("--config", "plain", "--concurrency", "1,x"), "1,x"),
        (("--config", "plain", "--concurrency", "2,2"), "2,2"),
        (("--config", "unknown"), "unknown"),
    ],
)
def test_options_that_cannot_work_are_refused_before_a_server_starts(sweep, options, complaint):
    result, _ = sweep(*options)
    assert result.exit_code != 0 and complaint in result.output
    assert FakeServer.pids == []
