"""Tests of the table of step times as real steps correct it: which of them teach, what, and how fast."""

import math
from types import SimpleNamespace

import numpy as np
import pytest
from step_tables import GAMMA, compute_bound, make_table, memory_bound

from sglang_dspark.scheduling import step_times
from sglang_dspark.scheduling.step_times import UPDATE_S, StepClock, StepKind, StepTimes

R, CONTEXT = 8, 300.0


def kind(drafts, requests=R):
    return StepKind(requests, round(requests * (1 + drafts)), GAMMA if drafts else 0, CONTEXT)


def table_ms(times, step):
    return times.table.step_ms(step.requests, step.num_tokens, step.depth, step.context)


def correction(times, drafts, requests=R):
    """Factor on the table of a step with so many drafts per request."""
    column = times.table.times(requests).column(drafts)
    return times.step_ms(requests, CONTEXT)[1, column] / times.table.times(requests).at(CONTEXT)[1, column]


def learn(times, factors, steps, noise=0.0, seed=0, period=1):
    """Steps in turn, one every ``period`` from the second kind on; ``factors``: true time over the table's."""
    rng = np.random.default_rng(seed)
    common, *others = factors
    for step in range(steps):
        drafts = others[step // period % len(others)] if others and step % period == 0 else common
        truth = factors[drafts] * table_ms(times, kind(drafts))
        times.observe(kind(drafts), truth * math.exp(noise * rng.standard_normal()))


def test_without_observations_times_are_the_tables():
    times = StepTimes(compute_bound())
    assert (times.step_ms(R, CONTEXT) == times.table.times(R).at(CONTEXT)).all()
    nothing = {"measured_ms": None, "predicted_ms": None, "common_factor": 1.0, "host_ms": {}, "correction": {}}
    assert times.report() == nothing


@pytest.mark.parametrize("speed", [1.0, 2.0])
def test_time_between_steps_is_the_same_for_all_of_them(speed):
    """The machine's speed concerns both alike, so that the ratio of two steps is what would be measured."""
    times, other_load = StepTimes(compute_bound()), StepTimes(compute_bound()).step_ms(4 * R, CONTEXT)
    before, host_ms = times.step_ms(R, CONTEXT), 5.0
    rng = np.random.default_rng(1)
    for _ in range(300):
        device_ms = speed * table_ms(times, kind(2)) * math.exp(0.02 * rng.standard_normal())
        expected_ms = times.observe(kind(2), device_ms, host_ms)
    assert expected_ms == pytest.approx(device_ms + host_ms, rel=0.1)
    assert times.step_ms(R, CONTEXT) == pytest.approx(before + host_ms / speed, rel=0.05)
    assert times.step_ms(4 * R, CONTEXT) == pytest.approx(other_load + host_ms / speed, rel=0.05)


@pytest.mark.parametrize("speed", [1.0, 2.0])
def test_side_by_side_the_slower_of_host_and_device_counts(speed):
    """While the host is the slower one, all steps that fit below it cost the same; the device is not taken for slow."""
    times, before = StepTimes(compute_bound(), overlapped=True), StepTimes(compute_bound()).step_ms(R, CONTEXT)
    host_ms = speed * float(np.median(before[GAMMA]))
    for _ in range(300):
        expected_ms = times.observe(kind(2), speed * table_ms(times, kind(2)), host_ms)
    assert expected_ms == pytest.approx(max(host_ms, speed * table_ms(times, kind(2))), rel=0.02)
    assert times.step_ms(R, CONTEXT) == pytest.approx(np.maximum(before, host_ms / speed), rel=0.03)
    assert times.report()["common_factor"] == pytest.approx(speed, rel=0.03)


def test_a_long_pause_between_two_steps_is_no_rule():
    times = StepTimes(compute_bound())
    for step in range(100):
        pause_ms = 1000.0 if step == 60 else 0.0
        times.observe(kind(2), table_ms(times, kind(2)), 3.0 + pause_ms)
        assert times.report()["host_ms"][str(R)] < 3.5


@pytest.mark.parametrize("factor", [0.5, 1.6, 3.0])
def test_a_constant_factor_is_followed_and_changes_no_ratio(factor):
    times = StepTimes(compute_bound())
    learn(times, {3: factor}, 30, noise=0.03)
    assert times.report()["common_factor"] == pytest.approx(factor, rel=0.1)
    learn(times, {3: factor}, 500, noise=0.03)
    assert times.report()["common_factor"] == pytest.approx(factor, rel=0.1)
    assert correction(times, 3) == pytest.approx(1, abs=0.06)
    assert correction(times, 0) == 1


@pytest.mark.parametrize("error", [0.8, 1.25])
def test_the_error_of_one_kind_of_step_is_learned_from_a_step_now_and_then(error):
    times = StepTimes(compute_bound())
    learn(times, {3: 1.3, 0: 1.3 * error}, 64 * 12, noise=0.03, period=64)
    assert correction(times, 0) / correction(times, 3) == pytest.approx(error, rel=0.04)
    assert correction(times, 5) == pytest.approx(1)


def test_the_first_step_of_a_kind_tells_most():
    times = StepTimes(compute_bound())
    learn(times, {3: 1.0}, 50)
    learn(times, {3: 1.0, 0: 1.15}, 1)
    assert 1.1 < correction(times, 0) / correction(times, 3) < 1.15


def test_steps_between_two_cells_are_corrected_as_they_were_observed():
    """1.5 drafts per request: what is learned there holds there, and not only half of it."""
    times = StepTimes(compute_bound())
    learn(times, {5: 1.0, 1.5: 1.2}, 800, period=4)
    assert correction(times, 1.5) / correction(times, 5) == pytest.approx(1.2, rel=0.02)
    assert min(correction(times, 1), correction(times, 2)) > 1.05


def test_other_loads_are_not_touched():
    times = StepTimes(compute_bound())
    learn(times, {3: 1.0, 0: 1.3}, 400, period=4)
    assert correction(times, 0, requests=R) > 1.1
    assert correction(times, 0, requests=R - 1) > 1.1  # the same power of two
    assert correction(times, 0, requests=2 * R) == correction(times, 0, requests=1) == 1


def test_one_outlier_does_not_rule_a_step_out():
    times = StepTimes(compute_bound())
    learn(times, {3: 1.0}, 100)
    times.observe(kind(0), 100 * table_ms(times, kind(0)))
    assert correction(times, 0) < 1.14


@pytest.mark.parametrize("speed", [0.8, 1.25])
def test_steps_whose_time_is_all_of_the_device_leave_the_host_time_alone(speed):
    times, steps = StepTimes(memory_bound(), overlapped=True), [kind(3), kind(0)]
    for step in steps * 20:
        times.observe(step, speed * table_ms(times, step), 2.0)
    for step in steps * 100:
        times.observe(step, speed * table_ms(times, step))
    assert times.report()["host_ms"] == {str(R): pytest.approx(2.0)}


def test_without_padding_attention_costs_what_the_table_says():
    table = make_table(lambda r, d, c: 10 + 1e-3 * r * (1 + d) * c, lambda r, d, c: 2 + 0 * r)
    ragged, padded = StepTimes(table, padded=False), StepTimes(table)
    assert ragged.single_ms(4, 2, GAMMA, CONTEXT) == pytest.approx(table.step_ms(4, 6, GAMMA, CONTEXT))
    assert padded.single_ms(4, 2, GAMMA, CONTEXT) > ragged.single_ms(4, 2, GAMMA, CONTEXT)


def test_a_table_that_is_wrong_by_a_factor_of_three_is_corrected():
    times = StepTimes(compute_bound())
    learn(times, {3: 1 / 3, 0: 1.0}, 400, period=2)
    assert correction(times, 0) / correction(times, 3) == pytest.approx(3, rel=0.1)


@pytest.mark.parametrize("factor", [1e-3, 1e3])
def test_corrections_are_bounded(factor):
    times = StepTimes(compute_bound())
    learn(times, {3: 1.0, 0: factor}, 3000, period=2)
    assert 1 / 4 - 1e-9 <= correction(times, 0) <= 4 + 1e-9
    assert 1 / 4 - 1e-9 <= correction(times, 3) <= 4 + 1e-9
    assert (times.step_ms(R, CONTEXT) > 0).all()


def test_drafts_beyond_the_block_belong_to_the_whole_block():
    """A tier may have more room than there are drafts."""
    times = StepTimes(memory_bound(tiers=(8, 64, 256)))
    for _ in range(100):
        padded, plain = StepKind(4, 64, GAMMA, CONTEXT), StepKind(4, 4, 0, CONTEXT)
        for kind in (padded, plain):
            factor = 1.2 if kind is padded else 1.0
            times.observe(kind, factor * times.table.step_ms(4, kind.num_tokens, kind.depth, CONTEXT))
    ratio = correction(times, GAMMA, requests=4) / correction(times, 0, requests=4)
    assert ratio == pytest.approx(1.2, rel=0.02)


def test_uncertainty_shrinks_with_every_step_and_comes_back_with_time():
    times = StepTimes(compute_bound())
    unknown = times.stddev(R, 3)
    assert unknown[3] == 0
    assert np.delete(unknown, 3) == pytest.approx(0.3 * math.sqrt(2))
    learn(times, {3: 1.0}, 100)
    stddevs = []
    for _ in range(5):
        stddevs.append(times.stddev(R, 3)[0])
        learn(times, {3: 1.0, 0: 1.0}, 1)
    assert (np.diff(stddevs) < 0).all()
    assert stddevs[1] < 0.6 * stddevs[0]
    learn(times, {3: 1.0}, 5000)
    assert times.stddev(R, 3)[0] > stddevs[4]
    assert times.stddev(2 * R, 3) == pytest.approx(unknown)


def test_single_steps_and_verification_by_drafts_agree_with_all_steps():
    times = StepTimes(compute_bound())
    learn(times, {3: 1.0, 0: 1.3, 7: 0.8}, 200, period=2)
    everything = times.step_ms(R, CONTEXT)
    assert times.by_drafts(R, 3, CONTEXT) == pytest.approx(everything[3, : R * 3 + 1])
    assert times.by_drafts(R, GAMMA, CONTEXT) == pytest.approx(everything[GAMMA])
    assert times.single_ms(R, 11, 3, CONTEXT) == everything[3, 11]


def test_verification_by_drafts_takes_the_next_tier():
    times = StepTimes(memory_bound(tiers=(8, 16, 32)))
    ms = times.by_drafts(5, GAMMA, CONTEXT)
    assert len(ms) == 5 * GAMMA + 1
    assert ms.tolist() == [times.table.step_ms(5, 5 + n, GAMMA, CONTEXT) for n in range(5 * GAMMA + 1)]


def test_the_report_is_json_and_compares_the_last_steps():
    times = StepTimes(compute_bound())
    learn(times, {3: 1.2}, 400)
    report = times.report()
    assert report["measured_ms"] == pytest.approx(1.2 * table_ms(times, kind(3)), rel=1e-6)
    assert report["predicted_ms"] == pytest.approx(table_ms(times, kind(3)), rel=0.02)
    assert list(report["correction"]) == ["8"]
    assert len(report["correction"]["8"]) == GAMMA + 1


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
    """Nor is a prompt: with a lag, no step that ended before it is timed after it."""
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
