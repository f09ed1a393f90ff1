"""Times of a device, on one that tells its own time."""

from types import SimpleNamespace

import pytest
import torch

from sglang_dspark.step import packed
from sglang_dspark.step.packed import AwaitedEvent, DeviceTimer


class Gpu:
    """Its clock moves when work is launched; events are done when it is told so."""

    def __init__(self):
        self.now, self.done = 0.0, False

    def event(self, enable_timing):
        assert enable_timing
        gpu, event = self, SimpleNamespace(at=None)
        event.record = lambda: setattr(event, "at", gpu.now)
        event.query = lambda: gpu.done
        event.elapsed_time = lambda other: other.at - event.at
        return event


@pytest.fixture
def gpu(monkeypatch):
    gpu = Gpu()
    monkeypatch.setattr(torch.cuda, "Event", gpu.event)
    return gpu


def test_a_span_has_what_was_launched_in_it(gpu):
    timer, spans = DeviceTimer(torch.device("cuda")), []
    for ms in (3.0, 5.0):
        spans.append(timer.begin())
        gpu.now += ms
        spans[-1].end()
        gpu.now += 100.0
    assert [span.ms for span in spans] == [None, None]
    gpu.done = True
    assert [span.ms for span in spans] == [3.0, 5.0]


def test_a_cpu_has_no_spans():
    span = DeviceTimer(torch.device("cpu")).begin()
    span.end()
    assert span.ms is None


def test_an_event_knows_how_long_it_was_waited_for(monkeypatch):
    now = [0.0]
    monkeypatch.setattr(packed.time, "perf_counter", lambda: now[0])
    event = AwaitedEvent(
        SimpleNamespace(synchronize=lambda: now.__setitem__(0, now[0] + 0.004), query=lambda: "its own")
    )
    assert event.waited_ms == 0
    event.synchronize()
    event.synchronize()
    assert event.waited_ms == pytest.approx(8)
    assert event.query() == "its own"
