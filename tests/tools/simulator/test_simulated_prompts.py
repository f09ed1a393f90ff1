"""Prompts in simulated time: what they cost requests that run, by the flags of a server."""

from collections import deque
from dataclasses import replace

import numpy as np
import pytest
from step_tables import GAMMA, h200_table, make_table

from sglang_dspark.config import DSparkConfig
from sglang_dspark.errors import ConfigError
from sglang_dspark.scheduling.policies import Beside
from sglang_dspark.tools.simulator.server import Costs, Prefill, SimulatedServer
from sglang_dspark.tools.simulator.sweep import Conditions, simulate_point
from sglang_dspark.tools.simulator.workload import ConditionalAcceptance, Lengths, Prompts, Request, Workload

TIERED = make_table(lambda r, d, c: 10.0 + 0 * r, lambda r, d, c: 2.0 + 0 * r, tiers=tuple(range(1, 513)))


@pytest.mark.parametrize(
    ("mixed", "rows", "gap_ms", "tokens_beside"),
    [
        (False, 0, 20 + 100 * 0.5, 0),
        (True, 0, 20 + 101 * 0.5, 1),
        (False, None, 10, 0),  # read by a verification of their own
        (True, None, 12, GAMMA + 1),
    ],
)
def test_a_prompt_beside_a_request_that_runs(mixed, rows, gap_ms, tokens_beside):
    """Blocks are always accepted. The first request's tokens are looked at when the batch behind them has run."""
    options = DSparkConfig(schedule="static", prompt_rows=rows)
    blocks = ConditionalAcceptance((1.0,) * GAMMA, concentration=np.inf)
    server = SimulatedServer(Costs(TIERED, Prefill(20.0, 0.5)), blocks, options, mixed_chunk=mixed)
    running, waiting = Request(0, 64, 100, known_tokens=1), Request(1, 100, 100)
    chunk = server.prompts.next_chunk(deque([waiting]), 1)
    assert chunk.read == [waiting]
    result = server.run([running], chunk, 0.0)
    assert result.ms == pytest.approx(gap_ms)
    assert (result.accepted + 1).sum() == tokens_beside
    assert server.run([running], None, 0.0).ms == pytest.approx(12)


def test_chunks_have_room_for_a_row_of_each_running_request():
    waiting = deque([Request(0, 5000, 1), Request(1, 6000, 1)])
    prompts = Prompts(TIERED, DSparkConfig(max_gap_ms=50.0), mixed=True)
    alone = prompts.next_chunk(waiting, 0)
    assert [piece[1:] for piece in alone.pieces] == [(0, 5000), (0, 3192)]
    assert alone.attended == 5000**2 // 2 + 3192**2 // 2
    assert alone.read == [alone.pieces[0].request]
    prompts.limit.rows = 64
    beside = prompts.next_chunk(waiting, 16)
    assert [piece[1:] for piece in beside.pieces] == [(3192, 64 - 16)]
    assert prompts.verified(beside, 16) == Beside(6, 48, 3192 + 24, 50.0)
    assert prompts.verified(beside, 59) is None  # a request more than any graph has
    assert Prompts(TIERED, DSparkConfig(prompt_rows=47), mixed=True).verified(beside) is None
    assert Prompts(replace(TIERED, tiers=()), DSparkConfig(), mixed=True).verified(beside) is None


def test_gaps_behind_a_long_prompt_are_bounded():
    """Whatever is read beside them: with drafts as long as they fit, and else with a token each."""
    found = {}
    for bound in (None, 30.0):
        costs = Costs(h200_table("one_budget/sps.json"), Prefill(6.5, 0.02, 7.5e-7))
        given = Conditions(
            costs, ConditionalAcceptance((0.8,) * GAMMA), Lengths(64, 64), Lengths(100, 100), num_requests=24,
            mixed_chunk=True, max_gap_ms=bound, long_prompt=16_000,
        )  # fmt: skip
        found[bound] = simulate_point(given, "auto", 8).figures
    assert 0.6 * 30 < found[30.0].gap_max_ms <= 30 < 150 < found[None].gap_max_ms


def test_a_bound_needs_chunks_beside_running_requests():
    with pytest.raises(ConfigError, match="--max-gap-ms 50"):
        Prompts(TIERED, DSparkConfig(max_gap_ms=50.0), mixed=False)


@pytest.mark.parametrize("requests", [1, 2, 9])
def test_one_user_more_sends_long_prompts_until_the_others_are_served(requests):
    blocks = ConditionalAcceptance((1.0,) * GAMMA)
    server = SimulatedServer(Costs(TIERED, Prefill(20.0)), blocks, DSparkConfig())
    workload = Workload(requests, Lengths(64, 64), Lengths(40, 40), users=2, long_prompt=9000)
    outcome, alone = server.serve(workload), server.serve(replace(workload, long_prompt=None))
    assert {(request.user == 2, request.prompt_tokens) for request in outcome.requests} == {(False, 64), (True, 9000)}
    others = [request for request in outcome.requests if request.user < 2]
    assert sorted(request.index for request in others) == sorted(request.index for request in alone.requests)
    assert max(r.sent_ms for r in outcome.requests if r.user == 2) <= max(request.done_ms for request in others)
