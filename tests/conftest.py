"""Prepares every test: no settings of this machine's user, no network; Triton kernels also run without a GPU."""

import os
from collections.abc import Iterator
from pathlib import Path
from unittest.mock import patch

if "PYTEST_XDIST_WORKER" in os.environ:
    # Before torch is imported. Threads of several processes that wait for each other on the same cores wait long.
    os.environ.setdefault("OMP_NUM_THREADS", "1")

import pytest
import torch
from hypothesis import HealthCheck, settings
from passed_record import PassedRecord

from sglang_dspark import on_cpu
from sglang_dspark.errors import FAILURES

on_cpu.watch_imports()  # the stand-in of this working tree, whichever one the environment was switched by

KEPT = "SGLANG_DSPARK_UNTESTED_SGLANG"  # of benchmarks/next_sglang.py, which tries another release
for name in [name for name in os.environ if name.startswith("SGLANG_DSPARK_") or name == "SGLANG_PLUGINS"]:
    if name != KEPT:
        del os.environ[name]
os.environ["HF_HUB_OFFLINE"] = "1"

if not torch.cuda.is_available():
    # Triton decides when a function is defined whether it interprets it; those of its library when it is imported.
    os.environ["TRITON_INTERPRET"] = "1"
    import interpreting
    import triton

    triton.knobs.runtime.interpret = True
    interpreting.patch_once_per_launch()
    # Only for this process: servers that tests start would inherit the variable.
    del os.environ["TRITON_INTERPRET"]


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--passed", type=Path, metavar="FILE", help="note there when each thorough test has passed")


def pytest_configure(config: pytest.Config) -> None:
    if (path := config.getoption("--passed")) and "PYTEST_XDIST_WORKER" not in os.environ:
        config.pluginmanager.register(PassedRecord(path))
    is_whole = config.args_source is config.ArgsSource.TESTPATHS and not (config.option.ignore or config.option.keyword)
    if is_whole and "PYTEST_XDIST_WORKER" in os.environ:
        from server_pool import prepare_servers

        prepare_servers()  # while the tests are collected


@pytest.fixture(autouse=True)
def no_advice_fails() -> Iterator[None]:
    """Fail a test in which advice failed: `best_effort` would hide it."""
    FAILURES.clear()
    yield
    assert not FAILURES


@pytest.fixture
def unhooked(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Have starts resolve their arguments only: SGLang stays unpatched in this process, and variables as they are."""
    from sglang_dspark.engine import hooks

    monkeypatch.setattr(hooks, "install", lambda *places: None)
    with patch.dict(os.environ):
        yield


# How long an example takes says nothing here: servers of other tests run next to it.
settings.register_profile("shared-machine", settings(), deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("shared-machine")


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark tests of interpreted kernels as slow, and group the tests of a file, which share its fixtures.

    Files with slow tests come right after those of servers: no process is left with one when others have nothing.
    """
    slow, quick = set(), set()
    for item in items:
        if "device" in getattr(item, "fixturenames", ()):
            item.add_marker("slow")
        if item.get_closest_marker("xdist_group") is None:
            item.add_marker(pytest.mark.xdist_group(str(item.path)))
            (slow if item.get_closest_marker("slow") else quick).add(item.path)
    items.sort(key=lambda item: item.path in quick - slow)
