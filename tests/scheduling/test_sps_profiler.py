"""Measuring the table, with a clock that only steps move."""

import numpy as np
import pytest

from sglang_dspark.scheduling import sps_table
from sglang_dspark.scheduling.sps_table import MAX_PASSES, MIN_PASSES, measure, timed_drafts

REQUESTS, DRAFTS, CONTEXTS = [1, 2, 4, 8], [0, 1, 2], [64, 1024]


class Machine:
    """Takes the time that a formula says; ``disturb(sample)`` adds to the n-th run of a cell, a wait ``queue_s``."""

    def __init__(self, monkeypatch, scale_s=1e-3, disturb=lambda sample: 0.0, queue_s=0.0):
        self.now, self.scale_s, self.disturb, self.queue_s = 100.0, scale_s, disturb, queue_s
        self.runs = {}
        self.loads = []
        monkeypatch.setattr(sps_table.time, "perf_counter", lambda: self.now)

    def seconds(self, requests, context, kind, drafts):
        return self.scale_s * (requests * (1 + drafts) + context / 1024 + (0.5 if kind == "draft" else 0))

    def load(self, requests, context):
        self.loads.append((requests, context))
        machine = self

        class Load:
            def run(self, kind, drafts):
                cell = (requests, context, kind, drafts)
                machine.runs[cell] = machine.runs.get(cell, 0) + 1
                machine.now += machine.seconds(*cell) + machine.disturb(machine.runs[cell])

            def draft(self, depth):
                self.run("draft", depth)

            def verify(self, drafts):
                self.run("verify", drafts)

        return Load()

    def measure(self, limit_s=1e9, **options):
        arguments = {"key": {"device": "fake"}, "requests": REQUESTS, "drafts": DRAFTS, "contexts": CONTEXTS}
        clock = lambda: self.now  # noqa: E731
        wait = self.wait if self.queue_s else None
        return measure(self.load, limit_s=limit_s, wait=wait, clock=clock, **(arguments | options))

    def wait(self):
        self.now += self.queue_s

    def expected_ms(self, requests, kind):
        grid = [[[self.seconds(r, c, kind, d) * 1e3 for c in CONTEXTS] for d in DRAFTS] for r in requests]
        return np.array(grid)


def assert_measured(table, machine, requests):
    assert table.requests == requests
    assert table.verify_ms == pytest.approx(machine.expected_ms(requests, "verify"))
    draft_ms = machine.expected_ms(requests, "draft")
    draft_ms[:, 0] = 0.0
    assert table.draft_ms == pytest.approx(draft_ms)


def test_every_cell_is_measured(monkeypatch):
    machine = Machine(monkeypatch)
    table = machine.measure(tiers=[8, 16])
    assert_measured(table, machine, REQUESTS)
    assert (table.drafts, table.contexts, table.tiers, table.key) == (DRAFTS, CONTEXTS, [8, 16], {"device": "fake"})
    assert ("draft", 0) not in {cell[2:] for cell in machine.runs}
    # the first pass warms every cell up
    assert set(machine.runs.values()) == {MAX_PASSES + 1}
    assert machine.loads == MAX_PASSES * [(r, c) for r in REQUESTS for c in CONTEXTS]


def test_of_long_blocks_some_numbers_of_drafts_are_measured(monkeypatch):
    assert [timed_drafts(most) for most in (0, 7, 10)] == [[0], [*range(8)], [*range(9), 10]]
    grid = timed_drafts(21)
    assert grid == [*range(9), 12, 16, 20, 21]
    machine = Machine(monkeypatch)
    table = machine.measure(drafts=grid)
    assert {cell[3] for cell in machine.runs} == {*grid}
    verify_ms = [[[machine.seconds(r, c, "verify", d) * 1e3 for c in CONTEXTS] for d in grid] for r in REQUESTS]
    assert table.drafts == list(range(22))
    assert table.verify_ms[:, grid] == pytest.approx(np.array(verify_ms))
    assert table.verify_ms[:, 14] == pytest.approx((table.verify_ms[:, 12] + table.verify_ms[:, 16]) / 2)
    assert table.draft_ms[:, 9] == pytest.approx((3 * table.draft_ms[:, 8] + table.draft_ms[:, 12]) / 4)


def test_short_steps_share_one_wait(monkeypatch):
    """If the device works on alone, the wait behind a step would count as its time."""
    machine = Machine(monkeypatch, scale_s=1e-4, queue_s=60e-6)
    expected = machine.expected_ms(REQUESTS, "verify")
    assert machine.measure().verify_ms == pytest.approx(expected + 60e-3 / 4)
    slow = Machine(monkeypatch, scale_s=1e-2, queue_s=60e-6)
    assert slow.measure().verify_ms == pytest.approx(slow.expected_ms(REQUESTS, "verify") + 60e-3)
    assert set(slow.runs.values()) == {MAX_PASSES + 1}


def test_the_first_run_of_a_cell_and_outliers_do_not_count(monkeypatch):
    assert MAX_PASSES >= 5
    machine = Machine(monkeypatch, disturb=lambda sample: {1: 3.0, 3: 0.7, 5: 0.2}.get(sample, 0.0))
    assert_measured(machine.measure(), machine, REQUESTS)


def one_pass_s(monkeypatch):
    machine = Machine(monkeypatch)
    machine.measure()
    return (machine.now - 100.0) / (MAX_PASSES + 1)


@pytest.mark.parametrize(
    ("passes_of_time", "passes"), [(2.01, MIN_PASSES - 1), (4.01, 3), (5.01, 4), (100, MAX_PASSES)]
)
def test_passes_end_with_the_time(monkeypatch, passes_of_time, passes):
    """The first pass takes two. Fewer than three only where these alone are too long."""
    unit = one_pass_s(monkeypatch)
    machine = Machine(monkeypatch)
    table = machine.measure(limit_s=passes_of_time * 2 * unit if passes_of_time == 2.01 else passes_of_time * unit)
    assert_measured(table, machine, REQUESTS)
    assert set(machine.runs.values()) == {passes + 1} or passes_of_time == 2.01
    assert machine.now - 100.0 <= max(passes_of_time * unit, 2 * passes_of_time * unit) + unit


def test_a_slow_machine_leaves_large_loads_out(monkeypatch):
    machine = Machine(monkeypatch)
    first_two = 2 * sum(
        machine.seconds(r, c, kind, d)
        for r in REQUESTS[:2]
        for c in CONTEXTS
        for d in DRAFTS
        for kind in ("draft", "verify")
        if d or kind == "verify"
    )
    table = machine.measure(limit_s=2 * first_two - 1e-6)
    assert_measured(table, machine, [1, 2])
    assert max(r for r, _ in machine.loads) == 2
    assert table.step_ms(8, 24, 2, 64.0) == pytest.approx(
        sum(machine.seconds(8, 64, k, 2) for k in ("draft", "verify")) * 1e3
    )


def test_two_loads_are_measured_on_the_slowest_machine(monkeypatch):
    """One alone would have no slope: a batch of 64 would seem to cost what one request does."""
    machine = Machine(monkeypatch)
    table = machine.measure(limit_s=1e-6)
    assert_measured(table, machine, [1, 2])
    assert set(machine.runs.values()) == {2}  # warm-up and one sample


def test_noise_above_a_larger_load_is_lowered_to_it(monkeypatch):
    """One cell of each kind took ten times as long in every pass."""
    machine = Machine(monkeypatch)
    calm, seconds = machine.measure(), machine.seconds
    machine.seconds = lambda r, c, kind, d: seconds(r, c, kind, d) * (10 if (r, d) == (2, 1) else 1)
    noisy, repaired = machine.measure(), machine.measure(monotone=True)
    for name in ("draft_ms", "verify_ms"):
        expected = getattr(calm, name).copy()
        assert getattr(noisy, name)[1, 1] == pytest.approx(10 * expected[1, 1])
        expected[1, 1] = expected[1, 2]
        assert getattr(repaired, name) == pytest.approx(expected)
