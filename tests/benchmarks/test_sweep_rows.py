"""Rows of ``sweep.csv``, the request log and the provenance."""

import json
from dataclasses import replace

import pandas as pd
import pytest
from serving.client import Reply
from serving.configurations import Configuration
from serving.cpu_time import CpuTime
from serving.request_log import RequestLog
from serving.row import COLUMNS, STAT_KEYS, Origin, RowWriter, make_row
from serving.schedule import Cell

from sglang_dspark import provenance

ORIGIN = Origin("set.jsonl", "target", "draft", "abc", "sglang=1 torch=2", "cpu, 2 cores", "")
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
}


def test_row_of_a_round():
    row = make_row(CELL, REPLIES, CpuTime(server_s=2.6, others_s=1.0), STATS, ORIGIN)
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
    assert (row.num_requests, row.num_tokens, row.num_prompt_tokens) == (2, 13, 10)


def test_row_without_speculation_leaves_its_figures_empty():
    single = replace(REPLIES[0], num_tokens=1, chunks_s=(12.5,))
    row = make_row(CELL, [single], CpuTime(1, 0), None, ORIGIN)
    assert row.accept_length is None and all(getattr(row, column) is None for column in STAT_KEYS)
    assert row.tpot_ms is None and row.itl_p50_ms is None


def test_schema_starts_with_the_columns_that_others_rely_on():
    assert COLUMNS[:5] == ("policy", "concurrency", "round", "output_tok_s", "per_user_tok_s")
    assert len(set(COLUMNS)) == len(COLUMNS)


def test_csv_reads_back(tmp_path):
    row = make_row(CELL, REPLIES, CpuTime(2.6, 1.0), STATS, ORIGIN)
    path = tmp_path / "sweep.csv"
    with RowWriter(path) as rows:
        rows.write(row)
        assert len(pd.read_csv(path)) == 1  # on disk before the sweep ends
        rows.write(make_row(CELL, REPLIES, CpuTime(2.6, 1.0), None, ORIGIN))
    frame = pd.read_csv(path)
    assert tuple(frame.columns) == COLUMNS
    assert frame["output_tok_s"].tolist() == pytest.approx([3.25, 3.25])
    assert frame["versions"][0] == ORIGIN.versions
    assert frame["drafted"][0] == 28 and pd.isna(frame["drafted"][1])


def test_request_log_keeps_answers_and_times(tmp_path):
    with RequestLog(tmp_path / "requests.jsonl") as log:
        log.write(CELL, REPLIES)
    first, second = (json.loads(line) for line in (tmp_path / "requests.jsonl").read_text().splitlines())
    assert (first["config"], first["concurrency"], first["round"], first["slot"]) == ("s3", 2, 5, 0)
    assert first["chunks_s"] == [0.5, 1.0, 1.5] and first["done_s"] == 2.5
    assert second["text"] == "d e" == log.answers[1].text


def test_provenance_hides_the_folders_of_the_machine():
    inside = str(provenance.REPOSITORY / "benchmarks" / "x.jsonl")
    words = ["/elsewhere/sweep.py", "--prompts", inside, "--target", "/models/some-target", "static:7 --page-size 1"]
    assert provenance.command(words) == (
        "python sweep.py --prompts benchmarks/x.jsonl --target some-target 'static:7 --page-size 1'"
    )


def test_provenance_names_versions_and_commit():
    assert {"python", "sglang", "torch"} <= provenance.versions().keys()
    assert len(provenance.commit().removesuffix("-dirty")) == 40


def test_json_is_replaced_in_one_step(tmp_path):
    path = tmp_path / "provenance.json"
    provenance.write_json(path, {"a": 1})
    provenance.write_json(path, {"a": 2})
    assert json.loads(path.read_text()) == {"a": 2}
    assert [p.name for p in tmp_path.iterdir()] == ["provenance.json"]
