"""Some steps update the step times, others do not."""

from types import SimpleNamespace

import pytest

from sglang_dspark.scheduling import step_times
from sglang_dspark.scheduling.step_times import UPDATE_S, StepClock, StepKind

LONG_S = 1.01 * UPDATE_S
PLAIN, DRAFTED = StepKind(2, 2, 0, 50.0), StepKind(2, 8, 3, 50.0)


@pytest.fixture
def now(monkeypatch):
    """Seconds that the clock reads; add to ``now.s``."""
    time = SimpleNamespace(s=100.0)
    monkeypatch.setattr(step_times.time, "perf_counter", lambda: time.s)
    return time


class Times:
    """Takes down what it is shown."""

    def __init__(self):
        self.seen = []

    def observe(self, kind, device_ms, host_ms=None):
        self.seen.append((kind, round(device_ms, 6), None if host_ms is None else round(host_ms, 6)))
        return float(len(self.seen))


def run(now, kinds, step_s, *, overlapped=True, paused_after=()):
    """Steps of a GPU that took all of their time; what was learned, and what each was expected to take."""
    clock, times, expected = StepClock(int(overlapped), synchronous=False), Times(), []
    for number, kind in enumerate(kinds):
        clock.start_step(times)
        expected.append(clock.last and clock.last.expected_ms)
        clock.decided()
        now.s += step_s
        for _ in range(2):  # results of two steps, each of which the host waited for
            clock.processed(step_s * 1e3, 0.125 * step_s * 1e3)
        clock.end_step(kind)
        if number in paused_after:
            clock.invalidate()
            now.s += 1.0
    return times.seen, expected


def test_of_steps_that_repeat_some_teach(now):
    seen, expected = run(now, [PLAIN] * 42, LONG_S / 4)
    assert len(seen) == 10
    # Reports get what the last update expected of such a step.
    assert expected == [None, None, *(float(1 + step // 4) for step in range(40))]


def test_long_steps_all_teach(now):
    seen, _ = run(now, [PLAIN] * 12, LONG_S)
    assert seen == [(PLAIN, pytest.approx(LONG_S * 1e3), pytest.approx(0.75 * LONG_S * 1e3))] * 10


@pytest.mark.parametrize(
    ("overlapped", "timed"),
    [(False, [False, True, True, False, True, True]), (True, [False, False, True, False, False, True])],
)
def test_a_pause_is_no_part_of_any_step(now, overlapped, timed):
    """Nor is a prompt: with a lag, no step that ended before it is timed behind it."""
    seen, expected = run(now, [PLAIN] * 6, LONG_S, overlapped=overlapped, paused_after=(2,))
    assert [ms is not None for ms in expected] == timed
    for _, _, host_ms in seen:
        assert host_ms == pytest.approx(0.75 * LONG_S * 1e3 if overlapped else 0.0, abs=1e-6)


def test_a_step_that_differs_from_the_last_teaches(now):
    kinds = [PLAIN, PLAIN, DRAFTED, PLAIN, PLAIN, PLAIN]
    seen, _ = run(now, [*kinds, None, None], UPDATE_S / 100)
    assert [kind for kind, _, _ in seen] == [PLAIN, DRAFTED, PLAIN]


def test_the_context_alone_makes_no_other_step(now):
    seen, _ = run(now, [StepKind(2, 2, 0, float(context)) for context in range(42)], LONG_S / 4)
    assert len(seen) == 10


def test_host_time_where_host_and_device_take_turns(now):
    seen, _ = run(now, [PLAIN] * 3, LONG_S, overlapped=False)
    assert seen == [(PLAIN, pytest.approx(LONG_S * 1e3), pytest.approx(0.0, abs=1e-6))] * 2


def test_without_measured_times_nothing_is_expected(now):
    clock = StepClock(0, synchronous=False)
    clock.start_step(None)
    clock.processed(1.0, 0.0)
    clock.end_step(PLAIN)
    now.s += 0.002
    clock.start_step(None)
    assert clock.last == step_times.TimedStep(2, pytest.approx(2.0), None)


def test_steps_that_the_host_has_awaited_teach_all_of_their_time(now):
    """Grammars and presets: the last step counts, and none of those around a change."""
    clock, times = StepClock(1, synchronous=False), Times()
    for awaited in [False, False, True, True, True, False, False]:
        clock.start_step(times, awaited=awaited)
        clock.decided()
        now.s += LONG_S if awaited else 2 * LONG_S
        clock.processed(LONG_S * 500, LONG_S * 250)
        clock.end_step(DRAFTED if awaited else PLAIN)
    assert times.seen == [(DRAFTED, pytest.approx(LONG_S * 1e3), None)] * 2
