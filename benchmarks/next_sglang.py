"""Try the plugin on the SGLang that is installed, whatever its release: what its sources and our tests say.

`make next PRE=VERSION` runs it in an environment with that release.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
import threading
from collections import defaultdict
from pathlib import Path
from typing import Any
from xml.etree import ElementTree as ET

import click

from sglang_dspark.engine.support import installed_sglang
from sglang_dspark.tools import provenance, sglang_names

ROOT = Path(__file__).resolve().parents[1]
PYTEST = (
    *("-m", "not thorough", "--continue-on-collection-errors"),
    *("--numprocesses", "2", "--dist", "loadgroup", "--no-loadscope-reorder"),
)
NUM_EXAMPLES = 3
"""Tests that are named for each error."""


def read(folder: Path) -> dict[str, Any]:
    """Return which of SGLang's names in a folder changed: what breaks the plugin, and what does not."""
    found = sglang_names.drifts(folder)
    rows = [
        {"name": drift.name, "served": drift.served, "is": drift.form or "gone", "places": drift.places}
        for drift in found
    ]
    return {
        "names": len(sglang_names.served()),
        "breaks": [row for row, drift in zip(rows, found, strict=True) if drift.breaks],
        "harmless": [row for row, drift in zip(rows, found, strict=True) if not drift.breaks],
    }


def run_tests(path: str, *, test_s: int, suite_s: int) -> dict[str, Any]:
    """Run the tests of a file or folder on the installed SGLang, and return their summary. None of them may hang.

    Args:
        path: for pytest.
        test_s: longest time of a test.
        suite_s: after this time no further test begins.
    """
    limits = (f"--timeout={test_s}", "--timeout-method=signal", f"--session-timeout={suite_s}")
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.xml"
        command = (sys.executable, "-m", "pytest", *PYTEST, *limits, f"--junitxml={report}", path)
        environment = os.environ | {"SGLANG_DSPARK_UNTESTED_SGLANG": "on"}
        with subprocess.Popen(
            command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        ) as run:
            watch = threading.Timer(suite_s + 2 * test_s, run.kill)
            watch.start()
            lines = []
            for line in run.stdout or ():
                sys.stdout.write(line)
                lines.append(line)
            watch.cancel()
        if report.exists():
            return summary(report)
    return {"ended": first_line("".join(lines)), "exit status": run.returncode}


def summary(report: Path) -> dict[str, Any]:
    """Return counts of a report in JUnit's format, and tests by the first line of their error."""
    counts = dict.fromkeys(("passed", "failed", "errors", "skipped"), 0)
    by_error: dict[str, set[str]] = defaultdict(set)
    for case in ET.parse(report).iter("testcase"):
        name = f"{case.get('classname')}::{case.get('name')}".removeprefix("::").partition("@")[0]
        problems = [*case.findall("failure"), *case.findall("error")]
        for problem in problems:
            line = first_line(problem.text or problem.get("message") or "")
            # Each process reports what it cannot collect.
            counts["failed" if problem.tag == "failure" else "errors"] += name not in by_error[line]
            by_error[line].add(name)
        counts["skipped"] += case.find("skipped") is not None
        counts["passed"] += not problems and case.find("skipped") is None
    errors = sorted(by_error.items(), key=lambda pair: -len(pair[1]))
    return counts | {
        "broken": [
            {"error": error, "tests": len(names), "such as": sorted(names)[:NUM_EXAMPLES]} for error, names in errors
        ]
    }


def first_line(text: str) -> str:
    """Return the first line of the error in pytest's output, without folders of this machine.

    Of a server that did not start, it is the error in its log.
    """
    lines = text.splitlines() or [""]
    marked = [line.removeprefix("E ").strip() for line in lines if line.startswith("E  ")]
    if marked and "LaunchError: " in marked[0]:
        marked = [line for line in marked[1:] if re.match(r"[\w.]+Error: ", line)] or marked
    return (marked or lines)[0].replace(sys.prefix, "VENV").replace(str(ROOT), ".")


@click.command()
@click.option("--output", required=True, type=click.Path(path_type=Path), help="Result file (JSON).")
@click.option("--test-s", default=300, show_default=True, help="Longest time of a test, in seconds.")
@click.option("--suite-s", default=3600, show_default=True, help="No test of a path begins after so many seconds.")
@click.argument("paths", nargs=-1, required=True)
def main(output: Path, test_s: int, suite_s: int, paths: tuple[str, ...]) -> None:
    """Compare the installed SGLang with the served one, and run the tests of PATHS on it, path by path."""
    found = read(sglang_names.installed())
    tested = {path: run_tests(path, test_s=test_s, suite_s=suite_s) for path in paths}
    release = installed_sglang()
    result = provenance.record() | {"release": release, "read": found, "tests": tested}
    provenance.write_json(output, result)
    click.echo(f"sglang {release}: of {found['names']} names {len(found['breaks'])} break the plugin")
    for path, counts in tested.items():
        click.echo(f"{path}: {', '.join(f'{value} {key}' for key, value in counts.items() if key != 'broken')}")
        for broken in counts.get("broken", ())[:10]:
            click.echo(f"  {broken['tests']} tests: {broken['error']}")
    click.echo(f"{output} has the rest")


if __name__ == "__main__":
    main()
