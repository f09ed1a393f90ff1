"""A whole sweep over servers without a model."""

import json
import os
import signal
import subprocess
import sys
import urllib.request
from pathlib import Path

import pandas as pd
import psutil
import pytest
import sweep_concurrency
from click.testing import CliRunner
from fake_engine import FakeEngine, served
from serving import profiles
from serving import sweep as sweep_module
from serving.row import COLUMNS

from sglang_dspark.tools import provenance

pytestmark = pytest.mark.slow


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

    def suspend(self):
        os.killpg(self.pid, signal.SIGSTOP)

    def resume(self):
        os.killpg(self.pid, signal.SIGCONT)

    def get_json(self, path):
        if path == "/server_info":
            return {"internal_states": [{}]}
        assert path == "/dspark/stats"
        self._rounds += 2
        others = ("drafted_tokens", "verified_tokens", "accepted_tokens", "steps", "plain_steps", "parked_steps")
        counts = dict.fromkeys(others, 7 * self._rounds)
        return counts | {"rounds": self._rounds, "committed_tokens": 3 * self._rounds}

    def flush_cache(self):
        urllib.request.urlopen(self.url + "/flush_cache", data=b"").close()

    def post_json(self, path, body):
        assert path == "/dspark/policy"
        self.policies.append(body)

    def post(self, path, body):
        assert path == "/start_profile" and body["num_steps"] == 3 and body["activities"] == ["CPU"]
        (Path(body["output_dir"]) / "TP-0.trace.json.gz").write_bytes(b"")

    def log_tail(self):
        return "last words"


@pytest.fixture
def sweep(tmp_path, monkeypatch):
    """Runs a sweep with the given options; returns click's result and the folder of results."""
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text("".join(json.dumps({"turns": [f"prompt [{index}]"]}) + "\n" for index in range(9)))
    monkeypatch.setattr(sweep_module, "LaunchedServer", FakeServer)
    monkeypatch.setattr(sweep_concurrency.signal, "signal", lambda *_: None)
    monkeypatch.setattr(FakeServer, "flags_seen", [])
    monkeypatch.setattr(FakeServer, "pids", [])
    monkeypatch.setattr(FakeServer, "policies", [])

    # Others may edit and commit while the tests run.
    monkeypatch.setattr(provenance, "changes_digest", lambda: "")
    monkeypatch.setattr(provenance, "commit", lambda: "this")

    def run(*options, engine=None):
        with served(engine or FakeEngine()) as url:
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
    cells = list(zip(frame["config"], frame["concurrency"], frame["round"], strict=True))
    assert [cell[1:] for cell in cells[::2]] == [cell[1:] for cell in cells[1::2]] == [(1, 0), (2, 0), (1, 1), (2, 1)]
    assert all({a[0], b[0]} == {"plain@bfloat16", "static:3@bfloat16"} for a, b in zip(*[iter(cells)] * 2, strict=True))
    assert (frame["num_tokens"] == 12).all()
    speculative = frame[frame["policy"] == "static"]
    assert (speculative["decode_rounds"] == 2).all() and (speculative["accept_length"] == 3.0).all()
    assert frame[frame["policy"] == "plain"]["drafted"].isna().all()

    requests = [json.loads(line) for line in (output / "requests.jsonl").read_text().splitlines()]
    asked = {(r["config"], r["concurrency"], r["round"], r["slot"]): r["prompt_index"] for r in requests}
    assert [asked["plain@bfloat16", 2, 1, slot] for slot in range(4)] == [4, 5, 6, 7]
    record = json.loads((output / "provenance.json").read_text())
    assert record["finished"] and (record["commit"], record["draft"]) == ("this", "draft")
    assert "static:3@bfloat16" in result.output and "output_tok_s: ratio" in result.output
    assert len(FakeServer.pids) == 2 and not any(psutil.pid_exists(pid) for pid in FakeServer.pids)


def test_policies_share_a_server_and_are_switched_before_each_cell(sweep):
    configs = ("--config", "static:3", "--config", "threshold:0.5", "--config", "auto", "--config", "plain")
    result, _ = sweep(*configs, "--draft", "folder/draft", "--concurrency", "2", "--rounds", "1")
    assert result.exit_code == 0, result.output
    assert len(FakeServer.pids) == 2
    assert not any("schedule" in flag for flags in FakeServer.flags_seen for flag in flags)
    policies = {"policy": "static", "verify_len": 3}, {"policy": "threshold", "confidence_threshold": 0.5}
    for switched in (FakeServer.policies[:3], FakeServer.policies[3:]):  # warm-up round, recorded round
        assert sorted(map(str, switched)) == sorted(map(str, [*policies, {"policy": "auto"}]))


def test_a_server_settles_on_answers_that_are_not_recorded(sweep):
    """Before every cell: one short answer per user, then an empty prefix cache."""
    engine = FakeEngine()
    options = ("--config", "plain", "--concurrency", "1,2", "--rounds", "1", "--num-prompts", "2")
    result, output = sweep(*options, engine=engine)
    assert result.exit_code == 0, result.output
    asked = [(body["messages"][0]["content"], body["max_tokens"]) for _, body in engine.bodies]
    settled = [tokens for text, tokens in asked if text == sweep_module.SETTLE_PROMPT.text]
    assert settled == [16] * 6  # two rounds of 1 and 2 users, the first one of them to warm up
    assert asked[0][0] == asked[2][0] == sweep_module.SETTLE_PROMPT.text
    assert engine.flushes == 4
    requests = (output / "requests.jsonl").read_text()
    assert sweep_module.SETTLE_PROMPT.text not in requests and len(requests.splitlines()) == 2 + 4


def test_servers_of_equal_rates_take_equal_steps_or_the_sweep_ends(sweep):
    """Whole blocks alone: other lengths, and other rates, take others."""
    rates = "SGLANG_DSPARK_SIMULATE_ACCEPTANCE=0.9,0.8,0.7"
    whole = ("--config", f"a=static:3 {rates}", "--config", f"b=builtin {rates}", "--device", "cuda")
    others = ("--config", f"c=static:2 {rates}", "--config", f"d=auto {rates}", "--config", f"e=static:3 {rates},0.6")
    numbers = ("--draft", "folder/draft", "--num-prompts", "1", "--rounds", "1", "--concurrency", "1")
    result, output = sweep(*whole, *others, *numbers)
    assert result.exit_code == 0, result.output
    assert json.loads((output / "requests.jsonl").read_text().splitlines()[0])["kept"] == [1, 2]

    class Drawing(FakeEngine):
        async def complete(self, request):
            self.kept = [1, len(self.bodies)]
            return await super().complete(request)

    (output / "sweep.csv").unlink()
    result, _ = sweep(*whole, *numbers, engine=Drawing())
    assert result.exit_code == 1
    said = " ".join(result.output.split())
    assert "with 1 user, " in said and "their times cannot be compared" in said and not (output / "report.md").exists()


def test_what_speculates_records_steps_of_all_users(sweep, monkeypatch):
    """After the cells: of each load, with as many users as it has."""
    asked, ask_all = set(), profiles.ask_all

    def counted(url, prompts, sampling, users, on_first):
        asked.add(users)
        return ask_all(url, prompts, sampling, users, on_first)

    monkeypatch.setattr(profiles, "ask_all", counted)
    options = ("--config", "plain", "--config", "s=static:3", "--draft", "d", "--num-prompts", "2", "--rounds", "1")
    result, output = sweep(*options, "--concurrency", "1,3", "--trace-steps", "3", "--together")
    assert result.exit_code == 0, result.output
    traces = {path.parent.name for path in output.rglob("*.trace.json.gz")}
    assert traces == {"s_1", "s_3"} and asked == {1, 3}


TWO = ("--config", "plain", "--config", "static:3", "--draft", "folder/draft", "--num-prompts", "2")


def cells_of(output):
    frame = pd.read_csv(output / "sweep.csv")
    return list(zip(frame["config"], frame["concurrency"], frame["round"], strict=True))


def test_interrupted_sweep_goes_on_where_it_stopped(sweep):
    options = (*TWO, "--concurrency", "1,2", "--rounds", "2")
    _, output = sweep(*options)
    everything, path = cells_of(output), output / "sweep.csv"
    lines = path.read_text().splitlines(keepends=True)
    path.write_text("".join([*lines[:4], lines[4][:30]]))  # three rows, and one that was being written
    before, FakeServer.policies[:] = lines[1:4], []
    result, _ = sweep(*options)
    assert result.exit_code == 0, result.output
    assert "3 cells are measured already, 5 are left" in result.output
    assert path.read_text().splitlines(keepends=True)[1:4] == before
    assert cells_of(output) == everything
    requests = [json.loads(line) for line in (output / "requests.jsonl").read_text().splitlines()]
    keys = [(r["config"], r["concurrency"], r["round"], r["slot"]) for r in requests]
    assert len(keys) == len(set(keys)) == 2 * 2 * (2 + 4)
    record = json.loads((output / "provenance.json").read_text())
    (earlier,) = record["earlier_runs"]
    assert record["finished"] >= record["started"] >= earlier["finished"] >= earlier["started"]


def test_other_terms_are_not_mixed(sweep):
    change, named = ("--max-tokens", "7"), "sampling"
    options = ("--config", "plain", "--num-prompts", "2", "--concurrency", "1", "--rounds", "1")
    _, output = sweep(*options)
    before = (output / "sweep.csv").read_text()
    FakeServer.pids.clear()
    result, _ = sweep(*options, *change, "--rounds", "2")
    assert result.exit_code == 1 and named in result.output and "choose another folder" in result.output
    assert (output / "sweep.csv").read_text() == before and FakeServer.pids == []
