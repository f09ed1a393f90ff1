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
    assert len(lengths) == 9
    assert max(abs(one.computed / one.published - 1) for one in lengths) < 0.01


@pytest.mark.parametrize("domain", ["math", "code", "chat"])
def test_a_simulated_server_commits_as_many_tokens_per_step(domain):
    """Through drafts, plan, acceptance and the statistics, not by the formula."""
    gamma = len(published.FIGURE_2["DSpark", domain])
    table = published.production_table("V4-Flash")
    wide = np.repeat(table.verify_ms[:, :1], gamma + 1, axis=1)
    seven = type(table)({}, table.requests, range(gamma + 1), [1], np.zeros_like(wide), wide)
    blocks = ConditionalAcceptance(published.FIGURE_2["DSpark", domain])
    lengths = Lengths(2000, 2000)
    conditions = Conditions(Costs(seven, Prefill(1.0, 0.0)), blocks, lengths, lengths, num_requests=16)
    figures = simulate_point(conditions, "static", users=8)[0].figures
    expected = np.mean(published.TABLE_1["DSpark", domain])
    assert figures.accept_length == pytest.approx(expected, rel=0.03)


def test_thresholds_trade_tokens_for_certainty_as_in_figure_5():
    """Relative to whole blocks, because the figure shows one set of a domain and ours the mean of its sets."""
    points = published.threshold_sweep()
    for domain in published.FIGURE_5:
        own = [point for point in points if point.domain == domain]
        verified, committed = ([getattr(point, name) for point in own] for name in ("verified", "committed"))
        assert verified == sorted(verified, reverse=True)
        assert committed == sorted(committed, reverse=True)
        compared = [point for point in own if point.published_verified >= verified[-1]]
        assert len(compared) >= 9
        for point in compared:
            ours = np.interp(point.published_verified, verified[::-1], committed[::-1]) / committed[0]
            assert ours == pytest.approx(point.published_committed / own[0].published_committed, abs=0.09)


def test_step_times_of_figure_8_lie_on_a_line():
    table = published.production_table("V4-Flash")
    for requests, throughput in published.FIGURE_8_MTP["V4-Flash"].items():
        step = table.step_ms(requests, 2 * requests, 1, 1)
        assert step == pytest.approx(requests / throughput, rel=0.002)


@pytest.mark.slow
def test_verify_budgets_fall_with_the_load_as_in_figure_8():
    points = published.budgets(engines=["V4-Flash"])
    simulated = [point.simulated for point in points]
    assert simulated == sorted(simulated, reverse=True)
    # At 20 requests the simulated step has room for whole blocks; the production engine verified less.
    assert all(point.simulated == pytest.approx(point.published, rel=0.1) for point in points[1:])
    assert points[0].simulated == pytest.approx(6.0, abs=0.1)
