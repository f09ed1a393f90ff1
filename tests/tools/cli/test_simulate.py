"""`simulate` as a user runs it."""

import csv
from dataclasses import replace
from pathlib import Path

import pytest
from step_tables import write_table

from sglang_dspark.scheduling.sps_table import SpsTable

RESULTS = Path(__file__).parents[3] / "benchmarks" / "results"


def test_the_example_shows_where_speculation_stops_to_pay(run):
    result = run("simulate", "--users", "1,64,128")
    assert result.exit_code == 0, result.output
    assert "whole blocks lose to plain decoding from 79 users on" in result.output
    fixed = {row[0]: row for line in result.output.splitlines() if (row := line.split())[1:2] == ["fixed"]}
    assert float(fixed["64"][5]) > 1 > float(fixed["128"][5])


@pytest.mark.slow
def test_policies_are_swept_and_written(run, tmp_path):
    table = write_table(tmp_path)
    outputs = ("--csv", tmp_path / "out.csv", "--plot", tmp_path / "out.png")
    options = ("--conditional", "0.8,0.7", "--policies", "auto,static:1,off", "--users", "1,4", "--requests", 12)
    result = run("simulate", "--table", table, *options, *outputs)
    assert result.exit_code == 0, result.output
    rows = list(csv.DictReader((tmp_path / "out.csv").open()))
    assert [(row["policy"], row["users"]) for row in rows] == [
        (policy, users) for policy in ("auto", "static:1", "off") for users in ("1", "4")
    ]
    by_policy = {row["policy"]: row for row in rows if row["users"] == "1"}
    assert float(by_policy["off"]["tpot_ms"]) == pytest.approx(10, rel=0.05)
    assert float(by_policy["static:1"]["verify_len"]) == 1
    assert float(by_policy["static:1"]["output_tok_s"]) > float(by_policy["off"]["output_tok_s"])
    assert (tmp_path / "out.png").read_bytes().startswith(b"\x89PNG")


def test_arrivals_at_a_rate(run, tmp_path):
    options = ("--conditional", "0.8,0.7", "--policies", "static", "--rate", "0.5,1", "--requests", 20)
    result = run("simulate", "--table", write_table(tmp_path), *options)
    assert result.exit_code == 0, result.output
    assert [line.split()[1] for line in result.output.splitlines() if line.split()[:1] == ["static"]] == ["0.5", "1"]


@pytest.mark.slow
def test_the_check_names_how_many_points_agree(run, tmp_path):
    files = ("--table", RESULTS / "sps_smollm2_cpu.json", "--check", RESULTS / "one_user" / "sweep.csv")
    result = run("simulate", *files, "--conditional", "0.65,0.7,0.7,0.7,0.7", "--csv", tmp_path / "check.csv")
    assert result.exit_code == 0, result.output
    assert "points of DSPARK within 15%" in result.output
    rows = list(csv.DictReader((tmp_path / "check.csv").open()))
    assert {"plain", "auto"} == {row["label"] for row in rows}
    assert all(float(row["simulated_tok_s"]) > 0 for row in rows)


def test_the_world_of_another_table(run, tmp_path):
    """Steps take three times what the scheduler is told: a plain token takes 30 ms."""
    table = write_table(tmp_path)
    (tmp_path / "true").mkdir()
    true = SpsTable.load(table)
    replace(true, verify_ms=3 * true.verify_ms).save(tmp_path / "true" / "sps.json")
    options = ("--conditional", "0.8,0.7", "--policies", "off", "--users", "1", "--requests", 4)
    worlds = ("--true-table", tmp_path / "true" / "sps.json", "--csv", tmp_path / "out.csv")
    assert run("simulate", "--table", table, *options, *worlds).exit_code == 0
    (row,) = csv.DictReader((tmp_path / "out.csv").open())
    assert float(row["tpot_ms"]) == pytest.approx(30, rel=0.05)


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (("--check", "sweep.csv", "--prefill-ms", "3"), "drop --prefill-ms"),
        (("--table", "sps.json", "--measured-steps"), "give --check, or --true-table instead"),
        (("--table", "t", "--check", "s", "--measured-steps", "--true-table", "u"), "say the same thing"),
        (("--users", "1,x"), "is not a list of numbers"),
        (("--users", "0"), "not above 0"),
        (("--table", "sps.json", "--users", "1", "--rate", "1"), "give one of them"),
        (("--csv", "out.csv"), "need --table; drop --csv"),
        (("--published", "--html", "x.html"), "drop --html"),
        (("--table", "sps.json", "--check", "sweep.csv", "--rate", "1"), "drop --rate"),
    ],
)
def test_options_that_do_not_go_together(run, options, says):
    result = run("simulate", *options)
    assert result.exit_code == 2
    assert says in result.output


@pytest.mark.thorough
def test_pages_are_written(run, tmp_path):
    options = ("--table", write_table(tmp_path), "--conditional", "0.8,0.7", "--policies", "off", "--users", "1,2")
    for name, arguments in {"model": (), "server": options}.items():
        path = tmp_path / f"{name}.html"
        assert run("simulate", *arguments, "--html", path).exit_code == 0
        assert path.read_text().startswith("<!doctype html>")


def test_a_folder_that_does_not_exist(run, tmp_path):
    result = run("simulate", "--html", tmp_path / "none" / "out.html")
    assert (result.exit_code, "there is no folder" in result.output) == (1, True)


def test_a_table_needs_acceptance(run, tmp_path):
    result = run("simulate", "--table", write_table(tmp_path))
    assert (result.exit_code, "give --blocks or --conditional" in result.output) == (2, True)


def test_a_policy_that_does_not_exist(run, tmp_path):
    result = run("simulate", "--table", write_table(tmp_path), "--conditional", "0.5,0.5", "--policies", "fast")
    assert (result.exit_code, "'fast' is no policy" in result.output) == (1, True)


@pytest.mark.slow
def test_published_numbers_stand_beside_ours(run):
    result = run("simulate", "--published")
    assert result.exit_code == 0, result.output
    rows = [line.split() for line in result.output.splitlines()]
    assert ["DSpark", "math", "5.57", "5.56", "-0.1%"] in rows
    assert any(row[:3] == ["V4-Flash", "200", "3.48"] for row in rows)
