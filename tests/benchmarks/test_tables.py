"""The documents hold the tables that the committed files give."""

import csv
import re
from collections import Counter
from math import prod
from statistics import median

import pytest
from tables import DOCUMENTS, MARKED, RESULTS, ROOT, TABLES, written


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
