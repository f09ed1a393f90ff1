"""Rows of ``sweep.csv``, the request log and the provenance."""

import json
from dataclasses import replace

import numpy as np
import pandas as pd
import pytest
from serving.client import Reply
from serving.configurations import Configuration
from serving.counters import CpuTime
from serving.output import Output
from serving.results import over_rounds, read_sweep
from serving.row import COLUMNS, decode_speed, make_row
from serving.schedule import Cell

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


def test_replies_of_complete_cells_are_kept_when_a_sweep_goes_on(tmp_path):
    path, row = tmp_path / "requests.jsonl", make_row(CELL, REPLIES, *OBSERVED)
    record = {"configurations": {}, "command": "", "started": "", "finished": None}
    output = Output(tmp_path, dict(record))
    output.write(CELL, row, REPLIES)
    rows = (tmp_path / "sweep.csv").read_text()
    output.write(replace(CELL, round=6), row, REPLIES)
    (tmp_path / "sweep.csv").write_text(rows)  # of the second cell the row is missing, of the third most of its replies
    with path.open("a") as file:
        file.write('{"config": "s3", "conc')
    assert Output(tmp_path, dict(record)).measured == {CELL.key}
    assert [json.loads(line)["round"] for line in path.read_text().splitlines()] == [5, 5]


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
