"""The times of simulated work, cell by cell."""

from dataclasses import replace

import pytest
from step_tables import GAMMA, make_table

from sglang_dspark.step.decision import PLAIN, StepDecision
from sglang_dspark.step.selection import FixedLength, TopK
from sglang_dspark.tools.simulator.server import Costs, Prefill, SimulatedServer
from sglang_dspark.tools.simulator.sweep import parse_policy
from sglang_dspark.tools.simulator.workload import ConditionalAcceptance, Lengths, Workload

NO_PREFILL = Prefill(0.0, 0.0)


def table():
    """Verification: 10 ms, 1 per token, 0.001 per token of context. Drafting: 2 ms, and 0.5 per request."""
    return make_table(lambda r, d, c: 10 + r * (1 + d) + 1e-3 * c, lambda r, d, c: 2 + 0.5 * r)


def test_a_step_is_what_the_table_says():
    costs = Costs(table(), NO_PREFILL)
    assert costs.step_ms(PLAIN, 4, 4, 64, 0) == pytest.approx(10 + 4 + 0.064)
    assert costs.step_ms(StepDecision(GAMMA, TopK(9)), 4, 13, 64, GAMMA) == pytest.approx(10 + 13 + 0.064 + 2 + 2)


def test_drafting_for_some_is_paid_for_them_alone():
    decision = StepDecision(GAMMA, TopK(GAMMA), draft_requests=(2,))
    ms = Costs(table(), NO_PREFILL).step_ms(decision, 8, 8 + GAMMA, 64, GAMMA)
    assert ms == pytest.approx(10 + 8 + GAMMA + 0.064 + 2 + 0.5)


def attention_bound(**options):
    """Every token of the verify forward costs 1 ms, and 0.01 per token of context that it attends to."""
    return make_table(lambda r, d, c: 10 + r * (1 + d) * (1 + 0.01 * c), lambda r, d, c: 2 + 0 * r, **options)


def test_attention_of_a_ragged_step_is_padded_to_the_longest_request_without_tiers():
    """Four requests verify 6, 0, 0 and 0 drafts: 10 tokens, of which attention makes 28."""
    decision, context = StepDecision(GAMMA, TopK(6)), 200.0
    ragged = Costs(attention_bound(tiers=range(1, 33)), NO_PREFILL)
    padded = Costs(attention_bound(), NO_PREFILL)
    exact = ragged.step_ms(decision, 4, 10, context, 6)
    assert exact == pytest.approx(10 + 10 * (1 + 2.0) + 2)
    assert padded.step_ms(decision, 4, 10, context, 6) == pytest.approx(exact + 18 * 2.0)
    uniform = StepDecision(6, FixedLength())
    assert padded.step_ms(uniform, 4, 28, context, 6) == pytest.approx(ragged.step_ms(uniform, 4, 28, context, 6))


def test_the_world_may_differ_from_what_the_scheduler_believes():
    """True steps take twice what the scheduler was told: it decides by its own table and finds out."""
    true, believed = table(), replace(table(), verify_ms=table().verify_ms / 2, draft_ms=table().draft_ms / 2)
    blocks = ConditionalAcceptance((0.0,) * GAMMA)
    server = SimulatedServer(Costs(true, NO_PREFILL, believed=believed), blocks, parse_policy("auto"))
    outcome = server.serve(Workload(8, Lengths(64, 64), Lengths(100, 100), users=1))
    assert outcome.figures().step_ms == pytest.approx(11.114, rel=0.01)
    learned = server.schedule.report()["schedule"]["step_time"]
    assert learned["common_factor"] * learned["correction"]["1"][0] == pytest.approx(2, rel=0.05)


def test_a_prefill_is_a_plain_step_and_verified_tokens():
    prefill = Prefill.from_table(table())
    assert (prefill.batch_ms, prefill.token_ms) == pytest.approx((11.064, 1.0))
    assert prefill.ms(100) == pytest.approx(111.064)


def test_the_schedule_is_told_what_steps_took_but_not_prefills():
    blocks = ConditionalAcceptance((0.0,) * GAMMA)
    server = SimulatedServer(Costs(table(), Prefill(500.0, 0.0)), blocks, parse_policy("auto"))
    outcome = server.serve(Workload(8, Lengths(64, 64), Lengths(100, 100), users=1))
    learned = server.schedule.report()["schedule"]["step_time"]
    assert outcome.plain_steps > 500
    assert learned["measured_ms"] == pytest.approx(11 + 0.114, rel=0.05)
    assert learned["common_factor"] * learned["correction"]["1"][0] == pytest.approx(1, rel=0.05)
