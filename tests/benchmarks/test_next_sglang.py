"""Tests of the summary of a test run on another SGLang."""

import subprocess
import sys

import next_sglang
import pytest

PASSES = "def test_passes(): pass\n"
FAILS = "import pytest\n\n@pytest.mark.parametrize('n', range(4))\ndef test_fails(n): assert n < 0, 'first\\nsecond'\n"
SKIPS = "import pytest\n\n@pytest.mark.skip\ndef test_skips(): pass\n"


@pytest.mark.slow
def test_tests_are_counted_by_their_first_error(tmp_path):
    for name, text in {"passes": PASSES, "fails": FAILS, "skips": SKIPS, "gone": "import no_such_module"}.items():
        (tmp_path / f"test_{name}.py").write_text(text)
    command = (sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--continue-on-collection-errors")
    subprocess.run([*command, "-n2", "--junitxml=report.xml"], cwd=tmp_path, check=False, capture_output=True)
    found = next_sglang.summary(tmp_path / "report.xml")
    failed, gone = found.pop("broken")
    assert found == {"passed": 1, "failed": 4, "errors": 1, "skipped": 1}
    assert (failed["error"], failed["tests"]) == ("AssertionError: first", 4)
    assert failed["such as"] == [f"test_fails::test_fails[{n}]" for n in range(3)]
    assert gone == {
        "error": "ModuleNotFoundError: No module named 'no_such_module'",
        "tests": 1,
        "such as": ["test_gone"],
    }


def test_paths_of_this_machine_are_left_out():
    said = f"{'x' * 9}\nE   ImportError: in {next_sglang.ROOT}/tests\nE   ({sys.prefix}/lib)\nE   more"
    assert next_sglang.first_line(said) == "ImportError: in ./tests"
    assert next_sglang.first_line(f"no such file {sys.prefix}/lib") == "no such file VENV/lib"
    assert next_sglang.first_line("") == ""


def test_the_error_of_a_server_is_that_of_its_log():
    said = "E   sglang_dspark.errors.LaunchError: ended\nE   End of log:\nE     File x\nE   KeyError: 'name'\nE   more"
    assert next_sglang.first_line(said) == "KeyError: 'name'"
    assert next_sglang.first_line("E   a.LaunchError: did not answer") == "a.LaunchError: did not answer"


def test_what_reading_finds_is_told_apart(monkeypatch, tmp_path):
    drift = next_sglang.sglang_names.Drift
    drifts = [
        drift("sglang.a", "(x)", None, ("a.py:1",), frozenset(["hook"]), True),
        drift("sglang.b", "(x)", "(x, y=...)", ("b.py:2",), frozenset(["call"]), False),
    ]
    monkeypatch.setattr(next_sglang.sglang_names, "drifts", lambda folder: drifts)
    found = next_sglang.read(tmp_path)
    assert found["breaks"] == [{"name": "sglang.a", "served": "(x)", "is": "gone", "places": ("a.py:1",)}]
    assert [row["is"] for row in found["harmless"]] == ["(x, y=...)"]
