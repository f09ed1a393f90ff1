"""The last minute of a server: what belongs to it, whatever the pauses between steps."""

import pytest

from sglang_dspark.features.reports.counters import Counters
from sglang_dspark.features.reports.recent import Recent
from sglang_dspark.features.reports.sums import Sums


class Server:
    """A clock that is set by hand, and steps that commit one token."""

    def __init__(self, start=1000.4):
        self.now = start
        self.counters = Counters(gamma=2)
        self.recent = Recent(self.counters, clock=lambda: self.now)

    @property
    def steps(self):
        return Sums.of([self.recent.report()["sums"]]).total().steps

    def step(self, now):
        self.now = now
        self.recent.tick()
        self.counters.record([0], [0], [0], policy="off")


def test_before_the_first_step():
    server = Server()
    server.now += 0.5
    assert server.recent.uptime_s == pytest.approx(0.5)
    report = server.recent.report()
    assert (server.steps, report["tokens_per_s"]) == (0, 0)


def test_recent_figures_forget():
    server = Server()
    for tenth in range(1200):  # two minutes of ten steps a second
        server.step(1000.5 + tenth / 10)
    report = server.recent.report()
    assert report["seconds"] == pytest.approx(60, abs=1)
    assert server.steps == pytest.approx(600, abs=10)
    assert report["tokens_per_s"] == pytest.approx(10, rel=0.01)


def test_rates_of_a_young_server_count_from_its_start():
    server = Server(start=1000.0)
    for tenth in range(20):
        server.step(1000.0 + tenth / 10)
    server.now = 1002.0
    assert server.recent.report()["tokens_per_s"] == pytest.approx(10)


def test_a_pause_is_a_pause():
    server = Server(start=1000.0)
    server.step(1001.5)
    server.step(1100.5)
    server.now = 1101.2
    assert server.steps == 1
    server.now = 1161.0
    assert server.steps == 0
