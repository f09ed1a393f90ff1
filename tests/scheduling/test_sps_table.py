"""The table of step times: interpolation, what lies beyond the grid, and its file."""

import itertools
import json
from dataclasses import replace
from statistics import median_low

import numpy as np
import pytest
from step_tables import CONTEXTS, GAMMA, compute_bound, make_table, memory_bound, random_table

from sglang_dspark.errors import ConfigError
from sglang_dspark.scheduling.sps_table import SpsTable, geometric_grid


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
        # The largest tier has less room: what was measured eagerly comes behind it.
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
