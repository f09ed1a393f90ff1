"""The paper's numbers beside this code's: the shapes agree, and where they do not, docs/simulation.md says why."""

import numpy as np
import pytest

from sglang_dspark.tools.simulator import published
from sglang_dspark.tools.simulator.blocks import ConditionalAcceptance
from sglang_dspark.tools.simulator.costs import Costs, Prefill
from sglang_dspark.tools.simulator.sweep import Conditions, simulate_point
from sglang_dspark.tools.simulator.workload import Lengths


def test_figure_2_multiplies_out_to_table_1():
    lengths = published.accept_lengths()
    assert len(lengths) == 3
    assert max(abs(one.ours / one.published - 1) for one in lengths) < 0.01


@pytest.mark.parametrize("domain", ["math", "code", "chat"])
def test_a_simulated_server_commits_as_many_tokens_per_step(domain):
    """Through drafts, plan, acceptance and the statistics, not by the formula."""
    gamma = len(published.FIGURE_2[domain])
    table = published.step_times("V4-Flash")
    wide = np.repeat(table.verify_ms[:, :1], gamma + 1, axis=1)
    seven = type(table)({}, table.requests, range(gamma + 1), [1], np.zeros_like(wide), wide)
    blocks = ConditionalAcceptance(published.FIGURE_2[domain])
    lengths = Lengths(2000, 2000)
    conditions = Conditions(Costs(seven, Prefill(1.0, 0.0)), blocks, lengths, lengths, num_requests=16)
    figures = simulate_point(conditions, "static", users=8).figures
    expected = np.mean(published.TABLE_1[domain])
    assert figures.accept_length == pytest.approx(expected, rel=0.03)


def test_thresholds_trade_tokens_for_certainty_as_in_figure_5():
    compared = published.thresholds()
    assert len(compared) == 15
    assert all(one.ours == pytest.approx(one.published, abs=0.09) for one in compared)


def test_step_times_of_figure_8_lie_on_a_line():
    table = published.step_times("V4-Flash")
    for requests, throughput in published.FIGURE_8_MTP["V4-Flash"].items():
        step = table.step_ms(requests, 2 * requests, 1, 1)
        assert step == pytest.approx(requests / throughput, rel=0.002)


@pytest.mark.slow
def test_verify_budgets_fall_with_the_load_as_in_figure_8():
    points = published.budgets(engines=["V4-Flash"])
    ours = [point.ours for point in points]
    assert ours == sorted(ours, reverse=True)
    # At 20 requests the simulated step has room for nearly whole blocks; the production engine verified less.
    assert all(point.ours == pytest.approx(point.published, rel=0.1) for point in points[1:])
    assert points[0].published < points[0].ours <= 6.0
