"""The last seconds of a server: what belongs to them, whatever the pauses between steps."""

import pytest

from sglang_dspark.metrics.counters import Counters
from sglang_dspark.metrics.history import HISTORY_S, History


class Server:
    """A clock that is set by hand, and steps that commit one token."""

    def __init__(self, start=1000.4):
        self.now = start
        self.counters = Counters(gamma=2)
        self.history = History(self.counters, clock=lambda: self.now)

    def step(self, now):
        self.now = now
        self.history.tick()
        self.counters.record([0], [0], [0], policy="off")


def test_before_the_first_step():
    server = Server()
    server.now += 0.5
    report = server.history.snapshot().report()
    assert report["uptime_s"] == pytest.approx(0.5)
    assert report["recent"]["steps"] == 0
    assert report["recent"]["tokens_per_s"] == 0
    assert server.history.snapshot(60).series() == []


def test_recent_figures_forget():
    server = Server()
    for tenth in range(1200):  # two minutes of ten steps a second
        server.step(1000.5 + tenth / 10)
    report = server.history.snapshot().report()
    assert report["committed_tokens"] == 1200
    assert report["recent"]["seconds"] == pytest.approx(60, abs=1)
    assert report["recent"]["tokens_per_s"] == pytest.approx(10, rel=0.01)
    assert report["steps_by_policy"] == {"off": 1200}


def test_rates_of_a_young_server_count_from_its_start():
    server = Server(start=1000.0)
    for tenth in range(20):
        server.step(1000.0 + tenth / 10)
    server.now = 1002.0
    assert server.history.snapshot().recent_report()["tokens_per_s"] == pytest.approx(10)


def test_a_pause_is_a_pause():
    server = Server(start=1000.0)
    server.step(1001.5)
    server.step(1100.5)
    server.now = 1101.2
    assert server.history.snapshot().recent_report()["steps"] == 1
    assert [point["steps"] for point in server.history.snapshot(101).series()] == [1, *[0] * 98, 1]
    server.now = 1161.0
    assert server.history.snapshot().recent_report()["steps"] == 0
    server.now = 1170.0
    assert {point["tokens_per_s"] for point in server.history.snapshot(60).series()} == {0.0}


def test_the_series_ends_with_the_last_whole_second():
    server = Server(start=1000.0)
    for second, steps in enumerate([2, 3, 4]):
        for index in range(steps):
            server.step(1001.1 + second + index / 10)
    server.now = 1003.5
    points = server.history.snapshot(2).series()
    assert [point["steps"] for point in points] == [2, 3]
    assert [point["second"] for point in points] == [1, 2]


def test_only_so_much_is_kept():
    server = Server(start=1000.0)
    for second in range(2 * HISTORY_S):
        server.step(1001.5 + second)
    points = server.history.snapshot(10 * HISTORY_S).series()
    assert len(points) == HISTORY_S
    assert {point["steps"] for point in points} == {1}
