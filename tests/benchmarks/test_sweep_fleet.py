"""Only the server under test runs, and none is left behind."""

import os
import signal
import subprocess
import sys
import time

import psutil
import pytest
from serving.client import ReplyError
from serving.fleet import Fleet

from sglang_dspark.errors import LaunchError

PROGRAM = "import time\nwhile True: time.sleep(0.05)"


class FakeServer:
    """A process group in place of a server; SIGTERM, which a suspended process cannot handle, ends it."""

    url, log_path = "http://nowhere", "server.log"

    def __enter__(self):
        self._process = subprocess.Popen([sys.executable, "-c", PROGRAM], start_new_session=True)
        self.pid = self._process.pid
        return self

    def __exit__(self, *error):
        self._process.terminate()
        try:
            self._process.wait(60)
            self.ended_by_itself = True
        except subprocess.TimeoutExpired:
            self.ended_by_itself = False
            self._process.kill()
            self._process.wait()

    def suspend(self):
        os.killpg(self.pid, signal.SIGSTOP)

    def resume(self):
        os.killpg(self.pid, signal.SIGCONT)

    def log_tail(self):
        return "last words"

    @property
    def is_suspended(self):
        return psutil.Process(self.pid).status() == psutil.STATUS_STOPPED

    def becomes(self, suspended):
        """Signals take their time."""
        deadline = time.monotonic() + 60
        while self.is_suspended != suspended and time.monotonic() < deadline:
            time.sleep(0.01)
        return self.is_suspended == suspended


@pytest.fixture
def servers():
    return {"a": FakeServer(), "b": FakeServer()}


def test_all_but_the_chosen_server_are_suspended(servers):
    started = []
    with Fleet(servers | {"again": servers["a"]}, started.append) as fleet:
        assert servers["a"].becomes(suspended=True) and servers["b"].becomes(suspended=True)
        with fleet.awake("b") as server:
            assert server is servers["b"]
            assert servers["a"].becomes(suspended=True) and servers["b"].becomes(suspended=False)
        assert servers["b"].becomes(suspended=True)
    assert started == ["a", "b"]
    assert servers["a"].ended_by_itself and servers["b"].ended_by_itself


class Unstartable(FakeServer):
    def __enter__(self):
        raise LaunchError("no room")


def test_a_server_that_does_not_start_leaves_no_other_behind():
    servers = {name: Unstartable() if name == "b" else FakeServer() for name in "abc"}
    with pytest.raises(LaunchError, match="no room"), Fleet(servers):
        pytest.fail("it started")
    assert [name for name, server in servers.items() if hasattr(server, "pid")] == ["a"]
    assert servers["a"].ended_by_itself


def test_servers_that_start_together_do_without_one_that_fails():
    servers = {name: Unstartable() if name in "bc" else FakeServer() for name in "abcd"}
    started = []
    with Fleet(servers | {"again": servers["b"]}, started.append, together=True) as fleet:
        assert fleet.failed.keys() == {"b", "c", "again"} and sorted(started) == [*"abcd"]
        with fleet.awake("d") as server:
            assert servers["a"].becomes(suspended=True) and server.becomes(suspended=False)
    assert servers["a"].ended_by_itself and servers["d"].ended_by_itself
    with pytest.raises(LaunchError, match="no room"), Fleet({"b": Unstartable()}, together=True):
        pytest.fail("none started")


def test_failed_request_shows_the_log_and_servers_are_stopped(servers):
    with pytest.raises(LaunchError, match=r"(?s)b: refused.*last words"), Fleet(servers) as fleet, fleet.awake("b"):
        raise ReplyError("refused")
    assert servers["a"].ended_by_itself and servers["b"].ended_by_itself
