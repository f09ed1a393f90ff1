"""Tests of the table of step times: how it is measured, its interpolation, and its file."""

import itertools
import json
from dataclasses import replace
from statistics import median_low

import numpy as np
import pytest
from step_tables import CONTEXTS, GAMMA, compute_bound, make_table, memory_bound, random_table

from sglang_dspark.errors import ConfigError
from sglang_dspark.scheduling import sps_table
from sglang_dspark.scheduling.sps_table import MAX_PASSES, MIN_PASSES, SpsTable, geometric_grid, measure, timed_drafts


def test_grid_points_are_reproduced():
    table = random_table(np.random.default_rng(0))
    for (r, requests), depth, (c, context) in itertools.product(
        enumerate(table.requests), range(1, GAMMA + 1), enumerate(table.contexts)
    ):
        for drafts in range(GAMMA + 1):
            expected = table.draft_ms[r, depth, c] + table.verify_ms[r, drafts, c]
            assert table.step_ms(requests, requests * (1 + drafts), depth, context) == pytest.approx(expected)
        assert table.step_ms(requests, requests, 0, context) == pytest.approx(table.verify_ms[r, 0, c])


def test_between_grid_points_the_time_is_linear():
    table = random_table(np.random.default_rng(1))
    mean_of = {
        (3, 3 * 4, 5, 64.0): [(2, 2 * 4, 5, 64.0), (4, 4 * 4, 5, 64.0)],
        (24, 24, 0, 1024.0): [(16, 16, 0, 1024.0), (32, 32, 0, 1024.0)],
        (8, 8 + 20, 7, 64.0): [(8, 8 + 16, 7, 64.0), (8, 8 + 24, 7, 64.0)],
        (8, 8 + 24, 7, 544.0): [(8, 8 + 24, 7, 64.0), (8, 8 + 24, 7, 1024.0)],
    }
    for step, neighbours in mean_of.items():
        assert table.step_ms(*step) == pytest.approx(np.mean([table.step_ms(*other) for other in neighbours]))


def test_all_steps_of_a_load_agree_with_single_steps():
    for tiers in ((), (8, 16, 24, 40, 100)):
        table = random_table(np.random.default_rng(2), tiers=tiers)
        load = table.times(5)
        for context in (10.0, 64.0, 500.0, 1024.0, 5000.0):
            times = load.at(context)
            assert times.shape == (GAMMA + 1, len(load.num_tokens))
            for depth, (column, num_tokens) in itertools.product(range(GAMMA + 1), enumerate(load.num_tokens)):
                assert times[depth, column] == table.step_ms(5, int(num_tokens), depth, context)


@pytest.mark.parametrize(
    ("requests", "tokens", "budgets"),
    [
        (1, [8], [7]),  # the first tier holds the whole block
        (5, [8, 16, 24, 40], [3, 11, 19, 35]),
        (16, [16, 24, 40, 100, 200], [0, 8, 24, 84, 112]),  # the last one has more room than there are drafts
        # The largest tier has less room: what was measured eagerly comes after it.
        (50, [100, 200, 250, 300, 350, 400], [50, 150, 200, 250, 300, 350]),
        (300, [300, 600, 900, 1200, 1500, 1800, 2100, 2400], [0, 300, 600, 900, 1200, 1500, 1800, 2100]),  # no tier
    ],
)
def test_with_tiers_they_and_larger_steps_of_the_grid_are_steps(requests, tokens, budgets):
    load = memory_bound(tiers=(8, 16, 24, 40, 100, 200)).times(requests)
    assert load.num_tokens.tolist() == tokens
    assert (load.drafts * requests).round().tolist() == budgets


def test_steps_past_the_largest_tier_go_on_costing_more():
    ms = compute_bound(tiers=(8, 16, 64)).times(16).at(64.0)[GAMMA]
    assert len(ms) == 2 + 4  # 16 and 64 rows, and 4 to 7 drafts for each of 16 requests
    assert (np.diff(ms) > 0).all()


def test_a_token_count_between_tiers_takes_the_next_one():
    table = random_table(np.random.default_rng(3), tiers=(8, 16, 24, 40))
    assert table.step_ms(5, 9, 3, 64.0) == table.step_ms(5, 16, 3, 64.0)
    assert table.step_ms(5, 16, 3, 64.0) != table.step_ms(5, 17, 3, 64.0)


def test_without_tiers_attention_is_padded_to_the_request_that_verifies_most():
    """A row of a request takes 1 us per token of its context."""
    attention = lambda r, d, c: 10 + 1e-3 * r * (1 + d) * c  # noqa: E731
    load = make_table(attention, lambda r, d, c: 2 + 0 * r).times(4)
    padded_rows = {(GAMMA, 10): 4 * (GAMMA + 1) - 14, (3, 10): 4 * 4 - 14, (GAMMA, 2): 4 * 3 - 6, (0, 0): 0, (3, 12): 0}
    for (depth, budget), rows in padded_rows.items():
        assert load.padding_ms[depth, budget] == pytest.approx(1e-3 * rows)
    assert not make_table(attention, lambda r, d, c: 2 + 0 * r, tiers=(8, 16, 32)).times(4).padding_ms.any()


@pytest.mark.parametrize("drafts", [0.0, 0.4, 0.6, 3.0, 6.9, 20.0])
def test_the_column_of_a_number_of_drafts_is_the_nearest(drafts):
    for tiers in ((), (8, 16, 24, 40)):
        load = memory_bound(tiers=tiers).times(5)
        assert load.column(drafts) == np.abs(load.drafts - drafts).argmin()


def beyond(table):
    """Steps beyond every edge of the grid, in ascending order of their context, then of their requests."""
    for requests in (1, 3, 64, 65, 100, 1000):
        for drafts, depth in itertools.product((0, 1, 7), (1, 7)):
            yield [
                table.step_ms(requests, requests * (1 + drafts), depth, context)
                for context in (1, 63, 64, 65, 1000, 1024, 1025, 2000, 10_000, 1_000_000)
            ]


@pytest.mark.parametrize("make", [compute_bound, memory_bound])
def test_beyond_the_grid_times_go_on_rising(make):
    table = make()
    for times in beyond(table):
        assert min(times) > 0
        assert (np.diff(times) >= 0).all()
    for requests in (64, 100, 200, 500):
        twice = table.step_ms(2 * requests, 2 * requests, 1, 64.0)
        assert table.step_ms(requests, requests, 1, 64.0) <= twice <= 2 * table.step_ms(requests, requests, 1, 64.0)


def test_a_slope_that_falls_by_chance_does_not_go_on():
    """Noise of a measurement, carried to ten times the grid's end, would make steps free, or worse."""
    falling = make_table(lambda r, d, c: 50 - 0.4 * r - 0.5 * d - 0.005 * c, lambda r, d, c: 20 - 0.2 * r - 0.1 * d)
    corner = falling.step_ms(64, 64 * 8, 7, 1024.0)
    for times in beyond(falling):
        assert min(times) >= corner - 1e-9
        assert (np.diff(times[5:]) >= 0).all()  # from the last context of the grid on
    assert falling.step_ms(64, 64 * 8, 7, 1025.0) == pytest.approx(corner)
    assert falling.step_ms(1000, 8000, 7, 1024.0) == pytest.approx(corner)


def test_one_point_is_a_grid():
    table = make_table(lambda r, d, c: 10 + d + 0 * r, lambda r, d, c: 1 + 0 * r, requests=[1], contexts=[64])
    assert table.step_ms(1, 3, 2, 10.0) == table.step_ms(8, 24, 2, 5000.0) == 13


def test_a_table_survives_its_file(tmp_path):
    table = random_table(np.random.default_rng(4), tiers=(8, 16))
    path = tmp_path / "below" / "table.json"
    table.save(path)
    loaded = SpsTable.load(path)
    assert loaded.mismatch(table.key) is None
    assert (loaded.requests, loaded.drafts, loaded.contexts) == (list(table.requests), table.drafts, list(CONTEXTS))
    assert loaded.tiers == [8, 16]
    assert loaded.draft_ms == pytest.approx(table.draft_ms, abs=1e-4)
    assert loaded.verify_ms == pytest.approx(table.verify_ms, abs=1e-4)
    assert [file.name for file in path.parent.iterdir()] == ["table.json"]


def test_the_first_difference_of_two_keys_is_named():
    table = replace(compute_bound(), key={"device": "H100", "torch": "2.11", "dtype": "bfloat16"})
    assert table.mismatch({"device": "H100", "torch": "2.11", "dtype": "bfloat16"}) is None
    assert table.mismatch({"device": "H200", "torch": "2.12", "dtype": "bfloat16"}) == (
        "device was 'H100' when it was measured and is 'H200' now"
    )
    assert table.mismatch({"device": "H100", "torch": "2.11"}) == (
        "dtype was 'bfloat16' when it was measured and is 'none' now"
    )
    # A property that servers do not have may be missing.
    assert replace(table, key={"device": "a", "adapters": "none"}).mismatch({"device": "a"}) is None


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"requests": [1, 4, 2]}, "requests=[1, 4, 2] must be a strictly ascending list"),
        ({"contexts": []}, "contexts=[] must be a strictly ascending list"),
        ({"requests": [2, 4]}, "requests=[2, 4] must start at 1"),
        ({"drafts": [1, 2]}, "drafts=[1, 2] must be 0, 1, ... gamma"),
        ({"verify_ms": [[[1.0]]]}, "verify_ms must be [2, 2, 1] finite, non-negative milliseconds"),
        ({"draft_ms": [[[0.0], [-1.0]], [[0.0], [1.0]]]}, "draft_ms must be [2, 2, 1] finite, non-negative"),
        ({"verify_ms": [[[0.0], [1.0]], [[1.0], [1.0]]]}, "verify_ms must be positive"),
        ({"verify_ms": [[[1.0], [1.0]], [[1.0]]]}, "damaged"),
        ({"verify_ms": "fast"}, "damaged"),
        ({"tiers": None}, "damaged"),
        ({"version": 0}, "format version 0, not 1; remove the file"),
    ],
)
def test_a_bad_file_is_refused_with_its_name_and_the_field(tmp_path, change, named):
    path = tmp_path / "table.json"
    small = make_table(lambda r, d, c: 1 + r + d, lambda r, d, c: 1 + 0 * r, requests=[1, 2], gamma=1, contexts=[64])
    small.save(path)
    content = json.loads(path.read_text())
    path.write_text(json.dumps(content | change))
    with pytest.raises(ConfigError) as caught:
        SpsTable.load(path)
    assert named in str(caught.value)
    assert str(path) in str(caught.value)
    assert "remove the file" in str(caught.value)


OF_SGLANG = [
    {"sample_batch_tokens": [1, 8], "sample_steps_per_sec": [50.0, 40.0], "max_batch_tokens": 8},
    {"bias_seconds": 0.01, "bs_probes": [1], "alpha_seconds": [0.0], "m_probes": [1], "theta_seconds": [0.0]},
]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        *((text, r"table\.json") for text in ("", "{", "[]", "3")),
        *((json.dumps(content), "written for SGLang's own worker; name another file") for content in OF_SGLANG),
    ],
)
def test_a_file_of_something_else_is_refused_and_kept(tmp_path, text, message):
    path = tmp_path / "table.json"
    path.write_text(text)
    with pytest.raises(ConfigError, match=message):
        SpsTable.load(path)
    assert path.read_text() == text
    with pytest.raises(ConfigError, match="nowhere"):
        SpsTable.load(tmp_path / "nowhere")


@pytest.mark.parametrize(
    ("last", "grid"),
    [
        (0, []),
        (1, [1]),
        (2, [1, 2]),
        (3, [1, 2, 3]),
        (16, [1, 2, 4, 8, 16]),
        (17, [1, 2, 4, 8, 16, 17]),
        (48, [1, 2, 4, 8, 16, 32, 48]),
    ],
)
def test_the_grid_of_requests_doubles_up_to_the_last(last, grid):
    assert geometric_grid(last) == grid


def test_no_step_is_slower_than_one_with_more_drafts():
    table = compute_bound()
    wrong = replace(table, verify_ms=table.verify_ms * np.array([3.0, *[1.0] * GAMMA])[None, :, None])
    mended = wrong.monotone()
    assert (np.diff(mended.verify_ms, axis=1) >= 0).all()
    assert (mended.verify_ms[:, 1:] == table.verify_ms[:, 1:]).all()
    assert (table.monotone().verify_ms == table.verify_ms).all()


def test_a_step_takes_the_most_of_the_least_medians_around_it():
    rng, table = np.random.default_rng(0), compute_bound()
    for _ in range(20):
        times = rng.integers(1, 9, table.verify_ms.shape).astype(float)
        mended = replace(table, verify_ms=times).monotone().verify_ms
        numbers = range(times.shape[1])
        for request, drafts, context in np.ndindex(times.shape):
            least = [
                min(median_low(times[request, first : last + 1, context]) for last in numbers[drafts:])
                for first in numbers[: drafts + 1]
            ]
            assert mended[request, drafts, context] == max(least)


@pytest.mark.parametrize("factor", [0.3, 0.5, 2.0, 3.0])
@pytest.mark.parametrize("drafts", range(GAMMA + 1))
def test_a_step_whose_time_is_far_off_moves_no_other_one_far(drafts, factor):
    table = compute_bound()
    off = np.where(np.arange(GAMMA + 1) == drafts, factor, 1.0)
    mended = replace(table, verify_ms=table.verify_ms * off[None, :, None]).monotone()
    one_draft = np.diff(table.verify_ms, axis=1).max(1, keepdims=True)
    others = [number for number in range(1, GAMMA + 1) if number != drafts]
    assert (np.abs(mended.verify_ms - table.verify_ms)[:, others] <= 1.001 * one_draft).all()


REQUESTS, DRAFTS, CELLS = [1, 2, 4, 8], [0, 1, 2], [64, 1024]


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
        arguments = {"key": {"device": "fake"}, "requests": REQUESTS, "drafts": DRAFTS, "contexts": CELLS}
        clock = lambda: self.now  # noqa: E731
        wait = self.wait if self.queue_s else None
        return measure(self.load, limit_s=limit_s, wait=wait, clock=clock, **(arguments | options))

    def wait(self):
        self.now += self.queue_s

    def expected_ms(self, requests, kind):
        grid = [[[self.seconds(r, c, kind, d) * 1e3 for c in CELLS] for d in DRAFTS] for r in requests]
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
    assert (table.drafts, table.contexts, table.tiers, table.key) == (DRAFTS, CELLS, [8, 16], {"device": "fake"})
    assert ("draft", 0) not in {cell[2:] for cell in machine.runs}
    # the first pass warms every cell up
    assert set(machine.runs.values()) == {MAX_PASSES + 1}
    assert machine.loads == MAX_PASSES * [(r, c) for r in REQUESTS for c in CELLS]


def test_of_long_blocks_some_numbers_of_drafts_are_measured(monkeypatch):
    assert [timed_drafts(most) for most in (0, 7, 10)] == [[0], [*range(8)], [*range(9), 10]]
    grid = timed_drafts(21)
    assert grid == [*range(9), 12, 16, 20, 21]
    machine = Machine(monkeypatch)
    table = machine.measure(drafts=grid)
    assert {cell[3] for cell in machine.runs} == {*grid}
    verify_ms = [[[machine.seconds(r, c, "verify", d) * 1e3 for c in CELLS] for d in grid] for r in REQUESTS]
    assert table.drafts == list(range(22))
    assert table.verify_ms[:, grid] == pytest.approx(np.array(verify_ms))
    assert table.verify_ms[:, 14] == pytest.approx((table.verify_ms[:, 12] + table.verify_ms[:, 16]) / 2)
    assert table.draft_ms[:, 9] == pytest.approx((3 * table.draft_ms[:, 8] + table.draft_ms[:, 12]) / 4)


def test_short_steps_share_one_wait(monkeypatch):
    """If the device works on alone, the wait after a step would count as its time."""
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
        for c in CELLS
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
