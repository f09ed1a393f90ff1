"""The simulator against the sweep of real servers that the README reports."""

from dataclasses import replace
from pathlib import Path
from statistics import median

import numpy as np
import pandas as pd
import pytest

from sglang_dspark.errors import ConfigError
from sglang_dspark.scheduling.sps_table import SpsTable
from sglang_dspark.tools.simulator.check import compare, rank_ceilings, rank_correlations
from sglang_dspark.tools.simulator.measured_sweep import (
    acceptance,
    fixed_step_ms,
    host_ms,
    measured_table,
    read_sweep,
)

RESULTS = Path(__file__).parents[3] / "benchmarks" / "results"
SWEEP = RESULTS / "sweep" / "sweep.csv"
TABLE = RESULTS / "sweep" / "sps.json"  # of its servers
TOLERANCE = 0.15


@pytest.fixture(scope="module")
def comparisons():
    table = SpsTable.load(TABLE)
    return compare(read_sweep(SWEEP), table)


@pytest.mark.thorough
def test_throughput_is_predicted(comparisons):
    assert len(comparisons) == 40
    assert not [(c.measured.users, c.measured.policy) for c in comparisons if abs(c.error) > TOLERANCE]


@pytest.mark.thorough
def test_auto_is_predicted_as_well_as_fixed_lengths():
    """Where both take the steps that were measured."""
    table, points = SpsTable.load(TABLE), read_sweep(SWEEP)
    comparisons = compare(points, table, true_table=measured_table(points, table, host_ms(points, table)))
    deciding, fixed = (
        median(c.error for c in comparisons if c.measured.decides is decides and c.measured.policy != "plain")
        for decides in (True, False)
    )
    assert 0 < fixed < 0.05
    assert abs(deciding) <= fixed
    for c in comparisons:
        if c.measured.decides:
            assert c.accept_length == pytest.approx(c.measured.accept_length, rel=0.11)


@pytest.mark.thorough
def test_ranks_are_of_the_speeds_of_a_load(comparisons):
    ranks = rank_correlations(comparisons)
    assert list(ranks) == [1, 2, 4, 8, 16]
    assert all(0 < rank <= 1 for rank in ranks.values())
    truth = [replace(c, tok_s=c.measured.tok_s) for c in comparisons]
    assert rank_correlations(truth) == dict.fromkeys(ranks, pytest.approx(1))
    reverse = [replace(c, tok_s=-c.measured.tok_s) for c in comparisons]
    assert rank_correlations(reverse) == dict.fromkeys(ranks, pytest.approx(-1))


def test_a_prediction_meets_the_order_of_a_sweep_as_far_as_its_rounds_do():
    point = next(p for p in read_sweep(SWEEP) if p.users == 1)

    def of_policies(*rates):
        return [replace(point, policy="static:1", rates=dict(enumerate(rate))) for rate in rates]

    agreeing = of_policies((3, 3, 3, 3), (2, 2, 2, 2), (1, 1, 1, 1))
    assert rank_ceilings(agreeing) == {1: pytest.approx(1)}
    # Two policies change places in the second half of the rounds: 0.5 in two of the six halves. In the others both
    # have the same median, which shares the ranks on both sides.
    turning = of_policies((4, 4, 2, 2), (2, 2, 4, 4), (1, 1, 1, 1))
    agreement = (2 * 0.5 + 4 * 1) / 6
    assert rank_ceilings(turning) == {1: pytest.approx((2 * agreement / (1 + agreement)) ** 0.5)}
    # Only rounds that all policies have are compared.
    more = [replace(agreeing[0], rates=agreeing[0].rates | {9: 0.0}), *agreeing[1:]]
    assert rank_ceilings(more) == rank_ceilings(agreeing)
    assert rank_ceilings(of_policies((3, 3, 3), (2, 2, 2), (1, 1, 1))) == {}
    assert rank_ceilings([replace(p, policy="plain") for p in agreeing]) == {}


def test_measured_steps_take_the_fixed_lengths_as_they_were():
    table, points = SpsTable.load(TABLE), read_sweep(SWEEP)
    host = host_ms(points, table)
    true = measured_table(points, table, host)
    for point in points:
        if point.fixed_len:
            assert fixed_step_ms(true, point) + host == pytest.approx(point.step_ms, rel=0.001)
    with pytest.raises(ConfigError, match="no fixed lengths"):
        measured_table([p for p in points if p.policy == "auto"], table, host)


def sweep_with(tmp_path, *changes):
    """The committed sweep and, for each of ``changes``, the rows of ``static:3`` at 4 users once more, changed."""
    frame = pd.read_csv(SWEEP)
    rows = frame[(frame["config"] == "static:3@bfloat16") & (frame["concurrency"] == 4)]
    pd.concat([frame, *(rows.assign(**change) for change in changes)]).to_csv(tmp_path / "sweep.csv", index=False)
    return tmp_path / "sweep.csv"


def test_open_loops_and_servers_of_others_are_left_out(tmp_path):
    changes = (
        {"concurrency": np.nan, "rate": 2.0, "config": "open"},
        {"policy": "external", "config": "theirs"},
        {"policy": "dflash", "config": "dflash"},
    )
    assert str(read_sweep(sweep_with(tmp_path, *changes))) == str(read_sweep(SWEEP))


def test_configurations_of_one_policy_are_points_of_their_own(tmp_path):
    rows = {"config": "static:3@bfloat16 --page-size 4", "output_tok_s": 1.0}
    points = read_sweep(sweep_with(tmp_path, rows, {"config": "again"}))
    found = {p.label: p for p in points if p.policy == "static:3" and p.users == 4}
    assert set(found) == {"static:3", "static:3@bfloat16 --page-size 4", "again"}
    assert found["static:3@bfloat16 --page-size 4"].tok_s == 1.0
    assert found["again"].tok_s == found["static:3"].tok_s


@pytest.mark.thorough
def test_time_to_first_token_follows_from_the_table(comparisons):
    """Nothing of it is fitted: prefills take what the table says of verification."""
    assert all(0.7 < c.ttft_ms / c.measured.ttft_ms < 1.25 for c in comparisons)


def test_acceptance_is_recovered_from_the_fixed_lengths():
    points = read_sweep(SWEEP)
    lengths = {p.policy: p.accepted_per_round for p in points if p.users == 16}
    survival = 1.0
    for n, rate in enumerate(acceptance(points)[16].conditional, start=1):
        survival *= rate
        step = lengths[f"static:{n}"] - lengths.get(f"static:{n - 1}", 0.0)
        assert survival == pytest.approx(step, abs=0.02)


def test_servers_of_another_dtype_are_left_out():
    path = RESULTS / "one_user" / "sweep.csv"  # a plain server in either
    both, one = read_sweep(path), read_sweep(path, "bfloat16")
    slow, fast = (next(p.tok_s for p in points if p.policy == "plain") for points in (both, one))
    assert slow < fast
    with pytest.raises(ConfigError, match="no rows of float16 servers"):
        read_sweep(path, "float16")


def test_files_that_are_no_sweep(tmp_path):
    (tmp_path / "sweep.csv").write_text("a,b\n1,2\n")
    for path in (tmp_path / "sweep.csv", tmp_path / "none.csv"):
        with pytest.raises(ConfigError, match="sweep_concurrency"):
            read_sweep(path)
