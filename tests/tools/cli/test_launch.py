"""`LaunchedServer`: starts, waits, reports failures with the log, and leaves no process behind."""

import contextlib
import itertools
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest

from sglang_dspark.errors import LaunchError
from sglang_dspark.tools import launch
from sglang_dspark.tools.launch import LaunchedServer

pytestmark = pytest.mark.usefixtures("stub_sglang")


def is_alive(pid: int) -> bool:
    """Return whether the process runs; one that has ended but was not yet collected does not."""
    return psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE


def becomes(condition: Callable[[], bool]) -> bool:
    """Return whether it holds within a minute."""
    deadline = time.monotonic() + 60
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.02)
    return condition()


def wait_until_dead(pid: int) -> bool:
    return becomes(lambda: not is_alive(pid))


def child_in(log: Path) -> int:
    return int(re.search(r"child (\d+)", log.read_text())[1])


def test_a_server_runs_inside_the_block_and_only_there(tmp_path):
    log = tmp_path / "log"
    server = LaunchedServer("model", "--dtype", "float32", log_path=log)
    with pytest.raises(LaunchError, match="not started"):
        _ = server.pid
    with server:
        argv = server.get_json("/argv")
        assert is_alive(server.pid)
    assert argv[:4] == ["--model-path", "model", "--dtype", "float32"]
    assert argv[-2:] == ["--host", "127.0.0.1"]
    assert server.url.endswith(f":{argv[argv.index('--port') + 1]}")
    assert server.startup_s > 0
    assert wait_until_dead(server.pid)


def test_an_exception_stops_a_server_that_is_asked_without_a_proxy(tmp_path, monkeypatch):
    for name in ("http_proxy", "HTTP_PROXY", "all_proxy"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")
    server, rounds = LaunchedServer("model", log_path=tmp_path / "log"), None
    with contextlib.suppress(KeyError), server:
        rounds = server.get_json("/dspark/stats")["rounds"]
        raise KeyError
    assert rounds == 0 and wait_until_dead(server.pid)


def test_variables_reach_the_server_on_top_of_the_environment(tmp_path, monkeypatch):
    monkeypatch.setenv("INHERITED", "kept")
    monkeypatch.setenv("SETTING", "of the user")
    with LaunchedServer("model", env={"SETTING": "of the caller"}, log_path=tmp_path / "log") as server:
        environment = server.get_json("/environment")
    assert (environment["INHERITED"], environment["SETTING"]) == ("kept", "of the caller")


def test_a_server_that_dies_is_reported_with_its_log(tmp_path):
    log = tmp_path / "log"
    with pytest.raises(LaunchError) as caught, LaunchedServer("some/die", log_path=log):
        pass
    message = str(caught.value)
    assert "ended with exit status 1" in message
    assert str(log) in message
    assert message.endswith("no such model")


def test_a_server_that_never_answers_is_given_up_and_stopped(tmp_path, monkeypatch):
    """Its seconds pass from when it has written to its log."""
    log = tmp_path / "log"
    ticks = itertools.count()
    clock = SimpleNamespace(monotonic=lambda: next(ticks) if "child" in log.read_text() else 0, sleep=time.sleep)
    monkeypatch.setattr(launch, "time", clock)
    server = LaunchedServer("hang", log_path=log, startup_timeout_s=3)
    with pytest.raises(LaunchError, match="did not answer within 3 s"), server:
        pass
    assert wait_until_dead(server.pid)
    assert wait_until_dead(child_in(log))


def test_children_that_outlive_the_server_are_stopped(tmp_path):
    log = tmp_path / "log"
    with pytest.raises(LaunchError, match="exit status 3"), LaunchedServer("orphan", log_path=log):
        pass
    assert wait_until_dead(child_in(log))


def test_a_stopped_server_holds_nothing_any_more(tmp_path, monkeypatch):
    """A scheduler that was killed gives its GPU back a while later, and the next server may need it."""
    looked, whole, answers = [], launch._group_runs, [True, True, False]
    with LaunchedServer("model", log_path=tmp_path / "log") as server:
        assert whole(server.pid)
        monkeypatch.setattr(launch, "_group_runs", lambda group: (looked.append(group), answers.pop(0))[1])
    assert looked == [server.pid] * 3
    assert not whole(server.pid)


@pytest.mark.parametrize("how", [signal.SIGTERM, signal.SIGKILL])
def test_nothing_outlives_a_launching_process_that_is_killed(tmp_path, how):
    log = tmp_path / "log"
    server = f"LaunchedServer('hang', log_path={str(log)!r})"
    script = f"from sglang_dspark.tools.launch import LaunchedServer\n{server}.__enter__()"
    launching = subprocess.Popen([sys.executable, "-c", script])
    # The server has started, and so has what ends it.
    assert becomes(lambda: len(psutil.Process(launching.pid).children()) == 2 and "child" in log.read_text())
    launching.send_signal(how)
    launching.wait()
    assert wait_until_dead(child_in(log))


def test_a_suspended_server_does_nothing_until_it_is_resumed_and_can_be_stopped(tmp_path):
    def is_stopped():
        return psutil.Process(server.pid).status() == psutil.STATUS_STOPPED

    with LaunchedServer("model", log_path=tmp_path / "log") as server:
        server.suspend()
        assert becomes(is_stopped)
        server.resume()
        assert becomes(lambda: not is_stopped())
        assert server.get_json("/dspark/stats")["rounds"] == 0
        server.suspend()
    assert wait_until_dead(server.pid)
