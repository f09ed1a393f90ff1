"""The simulator against the sweep of real servers that the README reports."""

from pathlib import Path

import pytest

from sglang_dspark.errors import ConfigError
from sglang_dspark.scheduling.sps_table import SpsTable
from sglang_dspark.tools.simulator.check import acceptance, compare, read_sweep

RESULTS = Path(__file__).parents[3] / "benchmarks" / "results"
TOLERANCE = 0.15


@pytest.fixture(scope="module")
def comparisons():
    table = SpsTable.load(RESULTS / "sps_smollm2_cpu.json")
    return compare(read_sweep(RESULTS / "policies" / "sweep.csv"), table)


@pytest.mark.slow
def test_throughput_is_predicted_where_the_steps_took_what_the_table_says(comparisons):
    """The points beyond the tolerance, and why: docs/simulation.md."""
    missed = {(c.measured.users, c.measured.policy) for c in comparisons if abs(c.error) > TOLERANCE}
    assert len(comparisons) == 40
    assert missed <= {
        *((users, "auto") for users in (2, 8, 16)),
        *((users, "static:2") for users in (2, 16)),
        *((4, policy) for policy in ("static:3", "static:5")),
        *((users, "threshold:0.5") for users in (8, 16)),
    }


@pytest.mark.slow
def test_what_remains_when_step_times_are_taken_out_is_small(comparisons):
    errors = [abs(c.error_at_speed) for c in comparisons]
    assert max(errors) < TOLERANCE
    assert sum(errors) / len(errors) < 0.04


@pytest.mark.slow
def test_time_to_first_token_follows_from_the_table(comparisons):
    """Nothing of it is fitted: prefills take what the table says of verification."""
    assert all(0.7 < c.ttft_ms / c.measured.ttft_ms < 1.25 for c in comparisons)


def test_acceptance_is_recovered_from_the_fixed_lengths():
    points = read_sweep(RESULTS / "policies" / "sweep.csv")
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
