"""The support matrix says what its files say."""

import json

import pandas as pd
import pytest
from support_matrix import ENTRIES, HEADER, rows, verdict
from tables import RESULTS


@pytest.mark.parametrize(
    ("ratio", "identity", "expected"),
    [
        (1.3, True, "pass"),
        (0.95, True, "pass"),
        (1.3, None, "warn"),
        (0.94, True, "fail"),
        (0.94, None, "fail"),
        (1.3, False, "fail"),
    ],
)
def test_verdicts(ratio, identity, expected):
    assert verdict(ratio, identity) == expected


def test_every_load_of_every_sweep_has_a_row():
    found = list(rows(RESULTS))
    assert {len(row) for row in found} == {len(HEADER)}
    for entry in ENTRIES:
        mine = [dict(zip(HEADER, row, strict=True)) for row in found if row[:2] == [entry.pair, entry.device]]
        if entry.sweep is None:
            assert [row["verdict"] for row in mine] == ["not run"]
            continue
        frame = pd.read_csv(RESULTS / entry.sweep / "sweep.csv")
        assert [int(row["users"]) for row in mine] == sorted(frame["concurrency"].unique())
        record = json.loads((RESULTS / entry.sweep / "provenance.json").read_text())
        assert {row["date"] for row in mine} == {record["started"][:10]}
        assert (entry.identity == ()) == all(row["texts"] == "not compared" for row in mine)


def test_every_committed_sweep_and_comparison_is_in_the_matrix():
    sweeps = {str(path.parent.relative_to(RESULTS)) for path in RESULTS.rglob("sweep.csv")}
    # Of pairs and devices that have longer ones, or steadier ones.
    on_gpu = ("copying", "equal_work", "policies", "qwen3_8b_shape/apart_later")
    sweeps -= {"oracle", *(f"h200/{name}" for name in on_gpu)}
    compared = {path.name for path in RESULTS.glob("identity*.json")}
    assert sweeps == {entry.sweep for entry in ENTRIES if entry.sweep}
    assert compared == {file for entry in ENTRIES for file in entry.identity}


def test_a_text_that_differs_fails_a_pair(tmp_path):
    for entry in ENTRIES[:1]:
        (tmp_path / entry.sweep).mkdir()
        for name in ("sweep.csv", "provenance.json"):
            (tmp_path / entry.sweep / name).write_bytes((RESULTS / entry.sweep / name).read_bytes())
        for passed, file in zip((False, True), entry.identity, strict=True):
            (tmp_path / file).write_text(json.dumps({"scenarios": [{"passed": True}, {"passed": passed}]}))
        row = dict(zip(HEADER, next(rows(tmp_path)), strict=True))
    assert (row["texts"], row["verdict"]) == ("differ", "fail")
