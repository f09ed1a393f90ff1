"""The documents hold the tables that the committed files give."""

import csv
import json
import re
from collections import Counter
from math import prod
from statistics import median

import pandas as pd
import pytest
from tables import DOCUMENTS, MARKED, MEASURED, RESULTS, ROOT, SUPPORT, TABLES, support_rows, verdict, written


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_documents_hold_the_tables_of_the_files(document):
    assert document.read_text(encoding="utf-8") == written(document), "write them with python benchmarks/tables.py"


def test_every_table_stands_in_one_document():
    """A marker in any other document would never be renewed."""
    files = [*ROOT.glob("*.md"), *ROOT.glob("*/*.md"), *(ROOT / "sglang_dspark").rglob("*.md")]
    found = Counter(match.group(2) for file in files for match in MARKED.finditer(file.read_text(encoding="utf-8")))
    assert found == dict.fromkeys(TABLES, 1)
    assert {file for file in files if "<!-- table:" in file.read_text(encoding="utf-8")} == set(DOCUMENTS)


def test_the_table_of_the_readme_is_computed_as_it_says():
    """Medians of the rounds, and the geometric mean of the ratios of each round; here without pandas."""
    with (RESULTS / "sweep" / "sweep.csv").open(newline="") as file:
        rows = [row for row in csv.DictReader(file) if row["concurrency"] == "1"]
    speeds = {
        policy: {row["round"]: float(row["output_tok_s"]) for row in rows if row["policy"] == policy}
        for policy in ("plain", "off", "auto")
    }
    expected = [median(by_round.values()) for by_round in speeds.values()]
    for above, below in (("off", "plain"), ("auto", "off")):
        ratios = [speed / speeds[below][index] for index, speed in speeds[above].items()]
        expected.append(prod(ratios) ** (1 / len(ratios)))
    (row,) = re.findall(r"^\| 1 \|(.*)\|$", TABLES["sweep"](), re.MULTILINE)
    cells = [float(cell.split()[0]) for cell in row.split("|")]
    assert cells[:3] == pytest.approx(expected[:3], abs=0.5)
    assert cells[3:5] == pytest.approx(expected[3:], abs=0.005)


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
    assert verdict([ratio, 1.2], identity) == expected


def test_every_load_of_every_sweep_is_in_a_row():
    found = list(support_rows())
    assert {len(row) for row in found} == {len(SUPPORT)}
    for entry in MEASURED:
        [mine] = [dict(zip(SUPPORT, row, strict=True)) for row in found if row[:2] == [entry.pair, entry.device]]
        if entry.sweep is None:
            assert mine["verdict"] == "not run"
            continue
        frame = pd.read_csv(RESULTS / entry.sweep / "sweep.csv")
        assert mine["users"] == ", ".join(map(str, sorted(frame["concurrency"].unique())))
        record = json.loads((RESULTS / entry.sweep / "provenance.json").read_text())
        assert mine["date"] == record["started"][:10]
        assert (entry.identity == ()) == (mine["texts"] == "not compared")


def test_every_committed_sweep_and_comparison_is_in_the_matrix():
    sweeps = {str(path.parent.relative_to(RESULTS)) for path in RESULTS.rglob("sweep.csv")}
    # Of pairs and devices that have longer ones, or steadier ones.
    on_gpu = ("copying", "equal_work", "policies", "qwen3_8b_shape/apart_later")
    sweeps -= {f"h200/{name}" for name in on_gpu} | {"selector_served"}  # of drafters that no user has
    compared = {path.name for path in RESULTS.glob("identity*.json")}
    assert sweeps == {entry.sweep for entry in MEASURED if entry.sweep}
    assert compared == {file for entry in MEASURED for file in entry.identity}


def test_a_text_that_differs_fails_a_pair(tmp_path):
    for entry in MEASURED[:1]:
        (tmp_path / entry.sweep).mkdir()
        for name in ("sweep.csv", "provenance.json"):
            (tmp_path / entry.sweep / name).write_bytes((RESULTS / entry.sweep / name).read_bytes())
        for passed, file in zip((False, True), entry.identity, strict=True):
            (tmp_path / file).write_text(json.dumps({"scenarios": [{"passed": True}, {"passed": passed}]}))
        row = dict(zip(SUPPORT, next(support_rows(tmp_path)), strict=True))
    assert (row["texts"], row["verdict"]) == ("differ", "fail")
