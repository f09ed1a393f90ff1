"""Tests of whole sweeps and of their clients, over servers without a model.

They look at the rows of ``sweep.csv``, the log of requests, and the provenance.
"""

import json
import threading
import time
import urllib.request
from dataclasses import replace
from pathlib import Path

import numpy as np
import pandas as pd
import psutil
import pytest
import sweep_concurrency
from click.testing import CliRunner
from fake_server import FakeServer, NotOk, SleepingServer
from serving import profiles
from serving import sweep as sweep_module
from serving.client import Reply, ReplyError, Sampling, ask_all
from serving.configurations import Configuration
from serving.counters import CpuTime
from serving.output import Output
from serving.prompts import Prompt
from serving.results import over_rounds, read_sweep
from serving.row import COLUMNS, decode_speed, make_row
from serving.schedule import Cell

from sglang_dspark.tools import provenance


class CountingServer(SleepingServer):
    """One for which the engine in this process answers."""

    flags_seen, pids, policies = [], [], []

    def __init__(self, target, *flags, env=None):
        self.flags_seen.append(flags)
        self._rounds = 0

    def __enter__(self):
        super().__enter__()
        self.pids.append(self.pid)
        return self

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


class Echo(FakeServer):
    """Streams every prompt back word by word.

    Args:
        together: requests of which none is answered before so many have come.
    """

    def __init__(self, together=1):
        super().__init__()
        self._together, self._begun, self._lock = together, threading.Event(), threading.Lock()
        self.running, self.most_running, self.kept = 0, 0, [1, 2]

    @property
    def asked(self):
        return [(path, body) for path, _, body in self.requests if path != "/flush_cache"]

    def answer(self, path, headers, body):
        if path == "/flush_cache":
            return {}
        chat = path == "/v1/chat/completions"
        text = body["messages"][0]["content"] if chat else body["prompt"]
        if text == "refused":
            raise NotOk(400, "too long")
        return self._streamed(chat, text, body)

    def _streamed(self, chat, text, body):
        with self._lock:
            self.running += 1
            self.most_running = max(self.most_running, self.running)
            if self.running == self._together:
                self._begun.set()
        assert self._begun.wait(60)
        words = text.split()
        for number, event in enumerate(events(chat, words)):
            if body["stream_options"]["continuous_usage_stats"]:
                event["usage"] = {"completion_tokens": number, "prompt_tokens": len(text)}
            yield sent(event)
            time.sleep(0.002)
        if body["return_spec_tokens_details"]:
            details = {"spec_tokens_details": {"spec_correct_drafts_histogram": self.kept}}
            yield sent({"choices": [], "sglext": details})
        yield sent({"choices": [], "usage": {"completion_tokens": len(words) + 1, "prompt_tokens": len(text)}})
        with self._lock:
            self.running -= 1
        yield b"data: [DONE]\n\n"


def sent(event):
    return b"data: " + json.dumps(event).encode() + b"\n\n"


def events(chat, words):
    if chat:
        yield {"choices": [{"delta": {"role": "assistant", "content": ""}}]}
        yield from ({"choices": [{"delta": {"content": word + " "}}]} for word in words)
        yield {"choices": [{"delta": {"content": None}, "finish_reason": "stop"}]}
    else:
        yield from ({"choices": [{"text": word + " "}]} for word in words)
        yield {"choices": [{"text": "", "finish_reason": "stop"}]}


@pytest.fixture
def sweep(tmp_path, monkeypatch):
    """Runs a sweep with the given options; returns click's result and the folder of results."""
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text("".join(json.dumps({"turns": [f"prompt [{index}]"]}) + "\n" for index in range(9)))
    monkeypatch.setattr(sweep_module, "LaunchedServer", CountingServer)
    monkeypatch.setattr(sweep_concurrency.signal, "signal", lambda *_: None)
    for noted in (CountingServer.flags_seen, CountingServer.pids, CountingServer.policies):
        noted.clear()

    # Others may edit and commit while the tests run.
    monkeypatch.setattr(provenance, "changes_digest", lambda: "")
    monkeypatch.setattr(provenance, "commit", lambda: "this")

    def run(*options, engine=None):
        with engine or Echo() as answering:
            CountingServer.url = answering.url
            arguments = ["--target", "folder/target", "--prompts", str(prompts), "--output", str(tmp_path / "out")]
            return CliRunner().invoke(sweep_concurrency.main, [*arguments, *options]), tmp_path / "out"

    return run


@pytest.mark.slow
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
    assert len(CountingServer.pids) == 2 and not any(psutil.pid_exists(pid) for pid in CountingServer.pids)


@pytest.mark.slow
def test_policies_share_a_server_and_are_switched_before_each_cell(sweep):
    configs = ("--config", "static:3", "--config", "threshold:0.5", "--config", "auto", "--config", "plain")
    result, _ = sweep(*configs, "--draft", "folder/draft", "--concurrency", "2", "--rounds", "1")
    assert result.exit_code == 0, result.output
    assert len(CountingServer.pids) == 2
    assert not any("schedule" in flag for flags in CountingServer.flags_seen for flag in flags)
    policies = {"policy": "static", "verify_len": 3}, {"policy": "threshold", "confidence_threshold": 0.5}
    for switched in (CountingServer.policies[:3], CountingServer.policies[3:]):  # warm-up round, recorded round
        assert sorted(map(str, switched)) == sorted(map(str, [*policies, {"policy": "auto"}]))


@pytest.mark.slow
def test_a_server_settles_on_answers_that_are_not_recorded(sweep):
    """Before every cell: one short answer per user, then an empty prefix cache."""
    engine = Echo()
    options = ("--config", "plain", "--concurrency", "1,2", "--rounds", "1", "--num-prompts", "2")
    result, output = sweep(*options, engine=engine)
    assert result.exit_code == 0, result.output
    asked = [(body["messages"][0]["content"], body["max_tokens"]) for _, body in engine.asked]
    settled = [tokens for text, tokens in asked if text == sweep_module.SETTLE_PROMPT.text]
    assert settled == [16] * 6  # two rounds of 1 and 2 users, the first one of them to warm up
    assert asked[0][0] == asked[2][0] == sweep_module.SETTLE_PROMPT.text
    assert len(engine.requests) - len(engine.asked) == 4  # flushes
    requests = (output / "requests.jsonl").read_text()
    assert sweep_module.SETTLE_PROMPT.text not in requests and len(requests.splitlines()) == 2 + 4


@pytest.mark.slow
def test_servers_of_equal_rates_take_equal_steps_or_the_sweep_ends(sweep):
    """Only whole blocks: other lengths, and other rates, take others."""
    rates = "SGLANG_DSPARK_SIMULATE_ACCEPTANCE=0.9,0.8,0.7"
    whole = ("--config", f"a=static:3 {rates}", "--config", f"b=builtin {rates}", "--device", "cuda")
    others = ("--config", f"c=static:2 {rates}", "--config", f"d=auto {rates}", "--config", f"e=static:3 {rates},0.6")
    numbers = ("--draft", "folder/draft", "--num-prompts", "1", "--rounds", "1", "--concurrency", "1")
    result, output = sweep(*whole, *others, *numbers)
    assert result.exit_code == 0, result.output
    assert json.loads((output / "requests.jsonl").read_text().splitlines()[0])["kept"] == [1, 2]

    class Drawing(Echo):
        def answer(self, *asked):
            self.kept = [1, len(self.requests)]
            return super().answer(*asked)

    (output / "sweep.csv").unlink()
    result, _ = sweep(*whole, *numbers, engine=Drawing())
    assert result.exit_code == 1
    said = " ".join(result.output.split())
    assert "with 1 user, " in said and "their times cannot be compared" in said and not (output / "report.md").exists()


@pytest.mark.slow
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


@pytest.mark.slow
def test_interrupted_sweep_goes_on_where_it_stopped(sweep):
    options = (*TWO, "--concurrency", "1,2", "--rounds", "2")
    _, output = sweep(*options)
    everything, path = cells_of(output), output / "sweep.csv"
    lines = path.read_text().splitlines(keepends=True)
    path.write_text("".join([*lines[:4], lines[4][:30]]))  # three rows, and one that was being written
    with (output / "requests.jsonl").open("a") as file:
        file.write('{"config": "static:3", "conc')
    before, CountingServer.policies[:] = lines[1:4], []
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


@pytest.mark.slow
def test_other_terms_are_not_mixed(sweep):
    change, named = ("--max-tokens", "7"), "sampling"
    options = ("--config", "plain", "--num-prompts", "2", "--concurrency", "1", "--rounds", "1")
    _, output = sweep(*options)
    before = (output / "sweep.csv").read_text()
    CountingServer.pids.clear()
    result, _ = sweep(*options, *change, "--rounds", "2")
    assert result.exit_code == 1 and named in result.output and "choose another folder" in result.output
    assert (output / "sweep.csv").read_text() == before and CountingServer.pids == []


PROMPTS = [Prompt(index, f"prompt {index}") for index in range(7)]
GREEDY = Sampling(max_tokens=9, temperature=0)


@pytest.mark.parametrize("raw", [False, True])
def test_replies_come_in_the_order_of_the_prompts(raw):
    with Echo(together=3) as engine:
        sampling = Sampling(max_tokens=9, temperature=0.5, ignore_eos=True, raw=raw)
        replies = ask_all(engine.url, PROMPTS, sampling, users=3)
    assert [reply.prompt_index for reply in replies] == list(range(7))
    assert [reply.text for reply in replies] == [f"prompt {index} " for index in range(7)]
    assert engine.most_running == 3
    path, body = engine.asked[0]
    assert path == ("/v1/completions" if raw else "/v1/chat/completions")
    assert (body["max_tokens"], body["temperature"], body["ignore_eos"]) == (9, 0.5, True)


def test_times_and_tokens_of_a_reply():
    with Echo() as engine:
        (reply,) = ask_all(engine.url, [Prompt(4, "one two three")], GREEDY, users=1)
    assert reply.num_tokens == 4 and reply.num_prompt_tokens == len("one two three")
    assert len(reply.chunks_s) == 3 and len(reply.gaps_s) == 2  # neither the role nor the finish reason is text
    assert (reply.tokens, reply.kept) == ((1, 2, 3), (1, 2))
    assert reply.sent_s < reply.chunks_s[0] <= reply.chunks_s[1] <= reply.chunks_s[2] <= reply.done_s
    assert reply.tpot_s == pytest.approx((reply.done_s - reply.chunks_s[0]) / 3)


def test_refused_request_fails_the_round_with_the_message_of_the_server():
    with Echo() as engine, pytest.raises(ReplyError, match=r"HTTP 400.*too long"):
        ask_all(engine.url, [*PROMPTS, Prompt(9, "refused")], GREEDY, users=2)


CELL = Cell(Configuration("s3", "static", "3", "float32"), 2, 5, 1)
REPLIES = [
    Reply(0, sent_s=10.0, chunks_s=(10.5, 11.0, 11.5), done_s=12.5, num_tokens=9, num_prompt_tokens=4, text="a b c"),
    Reply(1, sent_s=10.0, chunks_s=(11.0, 13.0), done_s=14.0, num_tokens=4, num_prompt_tokens=6, text="d e"),
]
STATS = {
    "drafted": 28,
    "verified": 12,
    "accepted": 8,
    "committed": 12,
    "decode_rounds": 4,
    "steps": 3,
    "plain_steps": 0,
    "parked_steps": 2,
    "prompts_beside": 1,
}

OBSERVED = CpuTime(server_s=2.6, others_s=1.0), STATS


def test_row_of_a_round():
    row = make_row(CELL, REPLIES, *OBSERVED)
    assert (row.policy, row.verify_len, row.concurrency, row.round, row.position) == ("static", 3, 2, 5, 1)
    assert row.wall_s == 4.0
    assert row.output_tok_s == pytest.approx(13 / 4)
    assert row.ttft_ms == pytest.approx(750)
    assert row.tpot_ms == pytest.approx(1e3 * (2 / 8 + 3 / 3) / 2)
    assert row.per_user_tok_s == pytest.approx((9 / 2.5 + 4 / 4) / 2)
    assert row.itl_p50_ms == pytest.approx(500)
    assert row.itl_p99_ms == pytest.approx(500 + 0.98 * 1500)
    assert row.server_cpu_ms_per_tok == pytest.approx(200)
    assert row.accept_length == 3.0
    assert (row.mean_verify_len, row.wasted_share, row.plain_share) == (3.0, pytest.approx(1 / 3), 0.0)
    assert row.in_flight == pytest.approx((2.5 + 4) / 4)
    assert row.per_user_tok_s_p5 == pytest.approx(1 + 0.05 * (9 / 2.5 - 1))
    assert (row.ttft_p50_ms, row.tpot_p50_ms) == pytest.approx((750, 625))
    assert (row.parked_steps, row.parked_share) == (2, pytest.approx(2 / 3))
    assert (row.num_requests, row.num_tokens, row.num_prompt_tokens, row.prompts_beside) == (2, 13, 10, 1)


def test_speed_while_all_users_decode():
    """Both do from 11.0 to 12.5: what has arrived by then after 11.0; and none if the server does not tell."""
    first, second = REPLIES
    told = [replace(first, tokens=(1, 3, 6)), replace(second, tokens=(2, 4))]
    third = replace(second, sent_s=12.5, chunks_s=(13.0, 13.5, 14.5), done_s=15.0, tokens=(1, 6, 9))
    assert decode_speed(told, 2) == pytest.approx(3 / 1.5)
    # Again from 13.0 to 14.0, when a chunk of the third arrives.
    assert decode_speed([*told, third], 2) == pytest.approx((3 + 5) / 2.5)
    assert decode_speed(told, 3) is decode_speed(REPLIES, 2) is None


def test_schema_starts_with_the_columns_that_others_rely_on():
    assert COLUMNS[:5] == ("policy", "concurrency", "round", "output_tok_s", "per_user_tok_s")
    assert len(set(COLUMNS)) == len(COLUMNS)


def test_files_hold_every_round_at_once_and_read_back(tmp_path):
    output = Output(tmp_path, {})
    output.write(CELL, make_row(CELL, REPLIES, *OBSERVED), REPLIES)
    assert len(pd.read_csv(tmp_path / "sweep.csv")) == 1  # on disk before the sweep ends
    other = replace(CELL, users=1)
    output.write(other, make_row(other, REPLIES, CpuTime(1, 0)), REPLIES)
    frame = read_sweep(tmp_path / "sweep.csv")
    assert tuple(frame.columns) == (*COLUMNS, "load")
    assert frame["output_tok_s"].tolist() == pytest.approx([3.25, 3.25])
    assert frame["drafted"][0] == 28 and pd.isna(frame["drafted"][1])
    assert frame["load"].tolist() == ["2 users", "1 user"]

    first, second, *_ = (json.loads(line) for line in (tmp_path / "requests.jsonl").read_text().splitlines())
    assert (first["config"], first["concurrency"], first["round"], first["slot"]) == ("s3", 2, 5, 0)
    assert first["chunks_s"] == [0.5, 1.0, 1.5] and first["done_s"] == 2.5
    assert second["text"] == "d e"


def test_sglangs_own_algorithms_tell_their_accept_length_only():
    row = make_row(CELL, REPLIES, CpuTime(1, 0), accept_length=2.5)
    assert row.accept_length == 2.5 and row.verified is None


def test_counts_are_pooled_over_rounds_and_times_are_medians():
    """A round of 90 decode rounds says more about accept length than one of 10."""
    rows = pd.DataFrame(
        {"accept_length": [2.0, 3.0, 4.0], "decode_rounds": [90, 10, 0], "itl_p50_ms": [10.0, 50.0, 20.0]}
    )
    assert over_rounds(rows, "accept_length") == pytest.approx((2.0 * 90 + 3.0 * 10) / 100)
    assert over_rounds(rows, "itl_p50_ms") == 20.0
    assert np.isnan(over_rounds(rows, "no_such_column"))
    told = rows.assign(decode_rounds=np.nan)  # a server that tells the quotient only
    assert over_rounds(told, "accept_length") == 3.0
