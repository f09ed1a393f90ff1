"""SLOs in simulated time: what is feasible is met more often, and everything together stays as fast."""

import pytest
from step_tables import h200_table

from sglang_dspark.tools.simulator.server import Costs, Prefill
from sglang_dspark.tools.simulator.sweep import Conditions, simulate_slo
from sglang_dspark.tools.simulator.workload import ConditionalAcceptance, Lengths


@pytest.mark.slow
def test_more_slos_are_met_at_the_same_speed():
    table = h200_table("promises/sps.json")
    costs, blocks = Costs(table, Prefill.from_table(table)), ConditionalAcceptance((0.7,) * 5)
    found = simulate_slo(Conditions(costs, blocks, Lengths(128, 128), Lengths(128, 128)), 48, 1.0)
    assert found.met > found.met_before + 0.05
    assert found.speed > 0.95
    assert 1.0 < found.other_tpot_ms / found.other_tpot_before_ms < 1.2
