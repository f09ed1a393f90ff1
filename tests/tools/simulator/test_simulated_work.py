"""Tests of simulated work: recorded blocks, times of cells, prompts, SLOs, and the crossover model."""

from collections import deque
from dataclasses import replace

import numpy as np
import pytest
from step_tables import GAMMA, h200_table, make_table

from sglang_dspark.config import DSparkConfig
from sglang_dspark.errors import ConfigError
from sglang_dspark.scheduling.policies import ExtraRows
from sglang_dspark.step.decision import PLAIN, StepDecision
from sglang_dspark.step.selection import FixedLength, TopK
from sglang_dspark.tools.simulator.server import Costs, Prefill, SimulatedServer
from sglang_dspark.tools.simulator.sweep import Conditions, CrossoverModel, parse_policy, simulate_point, simulate_slo
from sglang_dspark.tools.simulator.workload import (
    ConditionalAcceptance,
    Lengths,
    OwnBlocks,
    Prompts,
    RecordedBlocks,
    Request,
    Workload,
)


def recorded(with_logits=True):
    """Two answers: one whose drafts are never accepted, one whose drafts always are."""
    accepted = np.array([0, 0, 0, 2, 2])
    logits = np.array([[-3.0, -2.0]] * 3 + [[2.5, 3.5]] * 2) if with_logits else None
    return RecordedBlocks(2, accepted, logits, np.array([0, 0, 0, 1, 1]), "two answers")


@pytest.mark.parametrize("with_logits", [True, False])
def test_they_survive_the_disk(tmp_path, with_logits):
    blocks = recorded(with_logits)
    blocks.save(tmp_path / "blocks.jsonl")
    loaded = RecordedBlocks.load(tmp_path / "blocks.jsonl")
    assert (loaded.gamma, loaded.name) == (2, "two answers")
    np.testing.assert_array_equal(loaded.accepted, blocks.accepted)
    np.testing.assert_array_equal(loaded.answer, blocks.answer)
    assert (loaded.logits is None) == (not with_logits)
    if with_logits:
        np.testing.assert_allclose(loaded.logits, blocks.logits)


def test_a_request_keeps_to_one_answer():
    logits, accepted = recorded().draw([0, 1, 2, 3, 1], np.random.default_rng(0))
    assert accepted.tolist() == [0, 2, 0, 2, 2]
    assert (logits[:, 0] > 0).tolist() == [False, True, False, True, True]


@pytest.mark.parametrize(
    "text",
    [
        "",
        "[]",
        '{"format": "something", "version": 1, "gamma": 2, "name": ""}\n{"accepted": [1]}',
        '{"format": "sglang-dspark blocks", "version": 1, "gamma": 2, "name": ""}',
        '{"format": "sglang-dspark blocks", "version": 1, "gamma": 2, "name": ""}\n{"accepted": [3]}',
        '{"format": "sglang-dspark blocks", "version": 1, "gamma": 2, "name": ""}\n{"accepted": [1], "logits": [[1]]}',
    ],
)
def test_files_that_are_none(tmp_path, text):
    (tmp_path / "blocks.jsonl").write_text(text)
    with pytest.raises(ConfigError, match="evaluate --blocks"):
        RecordedBlocks.load(tmp_path / "blocks.jsonl")


def test_the_head_of_drawn_blocks_is_calibrated():
    source = ConditionalAcceptance((0.8, 0.5))
    logits, accepted = source.draw([0] * 50_000, np.random.default_rng(1))
    predicted = 1 / (1 + np.exp(-logits))
    assert predicted.mean(0) == pytest.approx([0.8, 0.5], abs=0.01)
    sure = predicted[:, 0] > 0.9
    assert (accepted[sure] >= 1).mean() == pytest.approx(predicted[sure, 0].mean(), abs=0.01)
    assert (accepted >= 2).mean() == pytest.approx(0.4, abs=0.01)


def test_rates_that_are_no_probabilities():
    with pytest.raises(ConfigError, match="probabilities"):
        ConditionalAcceptance((0.5, 1.5))


@pytest.mark.parametrize("with_logits", [True, False])
def test_the_nth_block_of_a_request_is_the_same_whatever_others_took(with_logits):
    rng = np.random.default_rng(2)
    accepted, answer = rng.integers(0, 3, 400), np.zeros(400, dtype=np.int64)
    source = RecordedBlocks(2, accepted, rng.normal(size=(400, 2)) if with_logits else None, answer)
    together, alone = OwnBlocks(source), OwnBlocks(source)
    for _ in range(100):
        logits, accepted = together.draw([5, 2, 9], rng)
        own_logits, own = alone.draw([2], rng)
        assert accepted[1] == own[0]
        assert (logits is None) == (not with_logits)
        if with_logits:
            np.testing.assert_array_equal(logits[1], own_logits[0])
    assert len({str(OwnBlocks(source).draw([request] * 20, rng)[1].tolist()) for request in (2, 3)}) == 2


NO_PREFILL = Prefill(0.0, 0.0)


def table():
    """Verification: 10 ms, 1 per token, 0.001 per token of context. Drafting: 2 ms, and 0.5 per request."""
    return make_table(lambda r, d, c: 10 + r * (1 + d) + 1e-3 * c, lambda r, d, c: 2 + 0.5 * r)


def test_a_step_is_what_the_table_says():
    costs = Costs(table(), NO_PREFILL)
    assert costs.step_ms(PLAIN, 4, 4, 64, 0) == pytest.approx(10 + 4 + 0.064)
    assert costs.step_ms(StepDecision(GAMMA, TopK(9)), 4, 13, 64, GAMMA) == pytest.approx(10 + 13 + 0.064 + 2 + 2)


def test_drafting_for_some_is_paid_only_for_them():
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
def test_a_prompt_next_to_a_request_that_runs(mixed, rows, gap_ms, tokens_beside):
    """Blocks are always accepted. The first request's tokens are looked at when the batch after them has run."""
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
    assert prompts.verified(beside, 16) == ExtraRows(6, 48, 3192 + 24, 50.0)
    assert prompts.verified(beside, 59) is None  # a request more than any graph has
    assert Prompts(TIERED, DSparkConfig(prompt_rows=47), mixed=True).verified(beside) is None
    assert Prompts(replace(TIERED, tiers=()), DSparkConfig(), mixed=True).verified(beside) is None


def test_gaps_after_a_long_prompt_are_bounded():
    """Whatever is read next to them: with drafts as long as they fit, and else with a token each."""
    found = {}
    for bound in (None, 30.0):
        costs = Costs(h200_table("one_budget/sps.json"), Prefill(6.5, 0.02, 7.5e-7))
        given = Conditions(
            costs, ConditionalAcceptance((0.8,) * GAMMA), Lengths(64, 64), Lengths(100, 100), num_requests=24,
            mixed_chunk=True, max_gap_ms=bound, long_prompt=16_000,
        )  # fmt: skip
        found[bound] = simulate_point(given, "auto", 8).figures
    assert 0.6 * 30 < found[30.0].gap_max_ms <= 30 < 150 < found[None].gap_max_ms


def test_a_bound_needs_chunks_next_to_running_requests():
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


@pytest.mark.slow
def test_more_slos_are_met_at_the_same_speed():
    table = h200_table("promises/sps.json")
    costs, blocks = Costs(table, Prefill.from_table(table)), ConditionalAcceptance((0.7,) * 5)
    found = simulate_slo(Conditions(costs, blocks, Lengths(128, 128), Lengths(128, 128)), 48, 1.0)
    assert found.met > found.met_before + 0.05
    assert found.speed > 0.95
    assert 1.0 < found.other_tpot_ms / found.other_tpot_before_ms < 1.2


@pytest.mark.parametrize("first", [0.5, 0.7, 0.9])
@pytest.mark.parametrize("block", [1, 5, 7])
def test_whole_blocks_lose_from_the_crossover_on(first, block):
    model = CrossoverModel(first, 0.95, block, capacity=1000)

    def gain(users):
        return model.point("fixed", users).user_speed / model.point("plain", users).user_speed

    users = int(model.crossover)
    assert gain(users) >= 1 > gain(users + 1)
    assert gain(1) == pytest.approx(model.point("fixed", 1).accept_length)


def test_the_schedule_is_never_behind_and_verifies_less_and_less():
    model = CrossoverModel()
    lengths = []
    for users in range(1, 400):
        points = {policy: model.point(policy, users) for policy in ("plain", "fixed", "scheduled")}
        assert points["scheduled"].user_speed >= max(points["plain"].user_speed, points["fixed"].user_speed) - 1e-12
        lengths.append(points["scheduled"].verify_len)
    assert lengths == sorted(lengths, reverse=True)
    assert (lengths[0], lengths[-1]) == (7, 0)


def test_waste_by_hand():
    point = CrossoverModel(0.5, 1.0, 2, 100).point("fixed", 1)
    assert (point.accept_length, point.wasted) == pytest.approx((1.75, 1 - 0.75 / 2))
