"""Writes into a file when each of the tests marked ``thorough`` has last passed, because CI runs none of them."""

from __future__ import annotations

import json
import subprocess
from datetime import UTC, datetime
from pathlib import Path

import pytest


class PassedRecord:
    """Updates a JSON file, test by test, with the day and the commit of this run.

    Args:
        path: of the file.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._ran: dict[str, bool] = {}

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Note how a test, its set-up or its clean-up went."""
        if "thorough" in report.keywords:
            test = report.nodeid.rpartition("@")[0] or report.nodeid  # after it stands xdist's group
            self._ran.setdefault(test, False)
            if report.when == "call" or report.failed:
                self._ran[test] = report.passed

    def pytest_sessionfinish(self) -> None:
        """Write the file: tests that failed keep the day on which they last passed."""
        known = json.loads(self._path.read_text()) if self._path.exists() else {}
        commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], check=True, capture_output=True, text=True)
        passed = {"passed": f"{datetime.now(UTC):%Y-%m-%d}", "commit": commit.stdout.strip()}
        for test, has_passed in self._ran.items():
            known[test] = passed if has_passed else known.get(test)
        self._path.write_text(json.dumps(known, indent=1, sort_keys=True) + "\n")
