"""The command line as a user runs it, inside this process."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from click.testing import CliRunner, Result
from fake_server import TraceServer

TESTS = Path(__file__).parents[2]
GOLDEN = TESTS / "data" / "golden"

Run = Callable[..., Result]


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch) -> Run:
    """``run("doctor", "--target", path)`` gives the finished command's output and exit code."""
    from sglang_dspark.tools.cli import main

    # rich wraps at the width of the terminal; the tests look for whole sentences.
    monkeypatch.setenv("COLUMNS", "1000")
    return lambda *arguments: CliRunner().invoke(main, [str(argument) for argument in arguments])


@pytest.fixture
def target() -> Path:
    return GOLDEN / "target"


@pytest.fixture
def draft() -> Path:
    return GOLDEN / "vanilla_g7"


@pytest.fixture
def stub_sglang(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Have ``python -m sglang.launch_server`` run stub_server.py in child processes: no model, quick imports."""
    package = tmp_path / "stub" / "sglang"
    package.mkdir(parents=True)
    (package / "__init__.py").touch()
    shutil.copyfile(Path(__file__).parent / "stub_server.py", package / "launch_server.py")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(package.parent), str(TESTS / "support")]))


@pytest.fixture
def server() -> Iterator[TraceServer]:
    with TraceServer() as server:
        yield server
