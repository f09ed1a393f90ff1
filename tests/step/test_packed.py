"""Tests of tensors that are packed for their way to the host, and of the times of a device."""

from itertools import cycle
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from sglang_dspark.step import packed
from sglang_dspark.step.packed import AwaitedEvent, DeviceTimer, Packed, PackedCopies

CPU = torch.device("cpu")
shapes = st.lists(st.integers(0, 5), min_size=1, max_size=3)


def numbers(dtype, shape, seed):
    generator = torch.Generator().manual_seed(seed)
    if dtype.is_floating_point:
        return torch.randn(shape, generator=generator, dtype=dtype)
    return torch.randint(-(2**40) if dtype == torch.int64 else -9, 2**30, shape, generator=generator, dtype=dtype)


@given(st.lists(shapes, max_size=4), st.lists(shapes, max_size=4))
def test_every_tensor_comes_out_as_it_went_in(wide, narrow):
    """Odd numbers of narrow ones included, after which a wide one could not start."""
    tensors = [numbers(torch.int64, shape, 1) for shape in [[3], *wide]]
    tensors += [numbers(torch.float32, shape, 2) for shape in narrow]
    for before, after in zip(tensors, Packed.of(tensors).read(), strict=True):
        assert before.dtype == after.dtype
        assert torch.equal(before, after)


@pytest.mark.parametrize("view", [lambda base: base[:, 1:3], lambda base: base[:, 2], lambda base: base[:1, 2]])
def test_views_are_packed(view):
    """Blocks, columns, and the lone element of a column, which is contiguous and has its stride."""
    base = torch.arange(12).view(3, 4)
    [got] = Packed.of([view(base)]).read()
    assert torch.equal(got, view(base))


@pytest.fixture
def ring():
    """Both memories are used again, the host's and the device's, as on a GPU."""
    copies = PackedCopies(64, CPU)
    copies._turns = cycle([torch.zeros((2, 64), dtype=packed.WORD).unbind() for _ in range(packed._DEPTH)])
    return copies


def test_a_result_is_whole_while_the_next_one_is_on_its_way(ring):
    """The host reads the result of a step when the next one is launched and its copy has begun."""
    before = None
    for step in range(10):
        arriving = ring.pack([torch.full((4,), step), torch.full((3,), step / 2)]).copy()
        if before is not None:
            whole, half = before.read()
            assert whole.tolist() == [step - 1] * 4
            assert half.tolist() == [(step - 1) / 2] * 3
        before = arriving


def test_more_than_there_is_room_for_is_refused(ring):
    with pytest.raises(ValueError, match="80 words are to be packed where there is room for 64"):
        ring.pack([torch.zeros(40, dtype=torch.int64)])


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
