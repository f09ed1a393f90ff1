"""`simulate` as a user runs it."""

import csv
import re

import pytest
from step_tables import write_table


def test_without_a_table_it_shows_where_speculation_stops_to_pay(run):
    result = run("simulate", "--users", "1,64,128")
    assert result.exit_code == 0, result.output
    assert "From 73 users on, whole blocks (fixed) are slower" in " ".join(result.output.split())
    fixed = {row[1]: row for line in result.output.splitlines() if (row := line.split())[:1] == ["fixed"]}
    assert float(fixed["64"][3]) > 1 > float(fixed["128"][3])


@pytest.mark.slow
def test_policies_are_compared_with_off_and_written(run, tmp_path):
    files = {"--csv": tmp_path / "out.csv", "--html": tmp_path / "out.html"}
    lengths = ("--prompt-tokens", 16, "--output-tokens", 40)
    options = ("--conditional", "0.8,0.7", "--policies", "auto,static:1", "--users", "1,64", *lengths)
    result = run(
        "simulate", "--table", write_table(tmp_path), *options, *(part for pair in files.items() for part in pair)
    )
    assert result.exit_code == 0, result.output
    assert "auto is not slower than off with 64 users" in result.output
    assert re.search(r"static:1 is slower than off from \d+ users on\.", result.output)
    rows = list(csv.DictReader(files["--csv"].open()))
    assert [(row["policy"], row["users"]) for row in rows] == [
        (policy, users) for policy in ("off", "auto", "static:1") for users in ("1", "64")
    ]
    by_policy = {row["policy"]: row for row in rows if row["users"] == "1"}
    assert float(by_policy["off"]["tpot_ms"]) == pytest.approx(10, rel=0.05)
    assert float(by_policy["static:1"]["verify_len"]) == 1
    assert float(by_policy["static:1"]["output_tok_s"]) > float(by_policy["off"]["output_tok_s"])
    assert files["--html"].read_text().startswith("<!doctype html>")


def test_the_last_acceptance_counts_for_the_rest_of_a_block(run, tmp_path, monkeypatch):
    """A server does so, too. Names of policies stay whole on narrow terminals."""
    monkeypatch.setenv("COLUMNS", "40")
    options = ("simulate", "--table", write_table(tmp_path), "--policies", "threshold:0.6", "--users", "1")
    shown = [run(*options, "--conditional", rates).output for rates in ("0.8", "0.8,0.8")]
    assert shown[0] == shown[1] and "threshold:0.6 " in shown[0]


def test_prompts_are_read_as_the_flags_say(run, tmp_path):
    lengths = ("--prompt-tokens", 16, "--output-tokens", 40, "--prefill", "500,0.1")
    options = ("--conditional", "0.8,0.7", "--policies", "auto", "--users", "4", *lengths, "--long-prompt", "9000")
    found = {}
    for flags in ((), ("--mixed-chunk", "--prompt-rows", "64", "--max-gap-ms", "600")):
        result = run("simulate", "--table", write_table(tmp_path), *options, *flags, "--csv", tmp_path / "out.csv")
        assert result.exit_code == 0, result.output
        [_, auto] = csv.DictReader((tmp_path / "out.csv").open())
        found[flags] = float(auto["gap_max_ms"])
    assert found[()] > 1000 > found["--mixed-chunk", "--prompt-rows", "64", "--max-gap-ms", "600"]


def test_slos_are_compared_with_none(run, tmp_path):
    options = ("--conditional", "0.9,0.9", "--users", "4", "--output-tokens", 40, "--slo", "20")
    result = run("simulate", "--table", write_table(tmp_path), *options, "--csv", tmp_path / "out.csv")
    assert result.exit_code == 0, result.output
    [row] = csv.DictReader((tmp_path / "out.csv").open())
    assert (row["users"], row["met"], row["met_before"]) == ("4", "1", "1")
    assert float(row["tpot_ms"]) == pytest.approx(20 * float(row["other_tpot_before_ms"]), rel=0.3)
    result = run("simulate", "--table", write_table(tmp_path), *options, "--requests", 6, "--csv", tmp_path / "few.csv")
    assert result.exit_code == 0 and (tmp_path / "few.csv").read_text() != (tmp_path / "out.csv").read_text()


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (("--users", "1,x"), "is not a list of numbers"),
        (("--users", "0"), "must be an integer of at least 1"),
        (("--csv", "out.csv"), "drop --csv"),
        (("--conditional", "0.5"), "drop --conditional"),
        (("--table", "sps.json", "--blocks", "b", "--conditional", "0.5"), "give only one of them"),
        (("--table", "sps.json"), "give --blocks or --conditional"),
        (("--table", "sps.json", "--conditional", "0.5,0.5", "--prefill", "1,2,3,4"), "at most three numbers"),
        (
            ("--table", "sps.json", "--conditional", "0.5,0.5", "--slo", "1", "--policies", "off"),
            "drop --policies",
        ),
    ],
)
def test_options_that_do_not_go_together(run, tmp_path, options, says):
    table = str(write_table(tmp_path))
    result = run("simulate", *(table if option == "sps.json" else option for option in options))
    assert result.exit_code == 2
    assert says in result.output


def test_the_page_of_the_model_is_written(run, tmp_path):
    assert run("simulate", "--html", tmp_path / "model.html").exit_code == 0
    assert (tmp_path / "model.html").read_text().startswith("<!doctype html>")


@pytest.mark.parametrize("lack", [("--users", "1"), ("--users", "4", "--requests", "1"), ("--output-tokens", "1")])
def test_slos_need_answers_of_both_kinds(run, tmp_path, lack):
    options = ("--table", write_table(tmp_path), "--conditional", "0.5,0.5", "--slo", "1")
    result = run("simulate", *options, *lack)
    assert (result.exit_code, "give --users of 2 or more" in result.output) == (1, True)


def test_a_folder_that_does_not_exist(run, tmp_path):
    result = run("simulate", "--html", tmp_path / "none" / "out.html")
    assert (result.exit_code, "there is no folder" in result.output) == (1, True)


def test_a_policy_that_does_not_exist(run, tmp_path):
    result = run("simulate", "--table", write_table(tmp_path), "--conditional", "0.5,0.5", "--policies", "fast")
    assert (result.exit_code, "'fast' is no policy" in result.output) == (1, True)
