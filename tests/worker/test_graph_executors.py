"""Steps as on a GPU, without a server: staged into tiers, laid out in buffers, replayed by calling again."""

from dataclasses import replace
from itertools import cycle

import pytest
import torch
from dspark_kernels import (
    ASKED_ROWS,
    NUM_ROWS,
    QUANTILES,
    USUAL,
    DraftBlock,
    SecondTexts,
    SimulatedDraws,
    simulated_accept,
    simulated_confidence,
)
from golden_server import CASES
from random_drafter import random_drafter
from sglang_objects import partly
from sglang_objects import worker as target_worker
from stage_loop import CPU, NO_CHAINS, GraphLoop, StageLoop, prompts_of
from step_tables import schedule

from sglang_dspark.config import DSparkConfig
from sglang_dspark.engine.graphs import Relay
from sglang_dspark.engine.part import Part
from sglang_dspark.engine.step_control import StepControl
from sglang_dspark.step.decision import StepDecision
from sglang_dspark.step.selection import FixedLength, Threshold, TopK, top_prefixes
from sglang_dspark.step.state import DraftOutput, RequestLimits
from sglang_dspark.worker import graphs
from sglang_dspark.worker.drafter import NoDrafter
from sglang_dspark.worker.graphs import ExecutorSelector
from sglang_dspark.worker.worker import DSparkWorker

NUM_TOKENS = 16


def expected(loop):
    return [case.output_ids[:NUM_TOKENS] for case in loop.golden.cases[:3]]


BY_BOTH = pytest.mark.parametrize(
    "keeps_logits", [pytest.param(False, marks=pytest.mark.thorough), True], ids=["fused", "split"]
)


@pytest.mark.parametrize(
    ("options", "slots"),
    [
        ({"schedule": "off"}, [1, 2, 3, 8]),
        pytest.param({"schedule": "static"}, [4], marks=pytest.mark.thorough),
        pytest.param({"schedule": "static", "verify_len": 2}, [1, 2, 3, 8], marks=pytest.mark.thorough),
        ({}, [4]),
    ],
    ids=["off", "static", "static-2", "auto"],
)
def test_greedy_text_of_replayed_steps(monkeypatch, options, slots):
    """The slots fit, or some are padding; graphs plan as well."""
    monkeypatch.setattr(graphs, "build_plan", None)
    loop = GraphLoop(monkeypatch, slots, **options)
    assert loop.serve(prompts_of(loop), NUM_TOKENS) == expected(loop)
    assert all(loop.replayed)


def test_weights_of_requests_reach_the_graph_that_plans_and_leave_it(monkeypatch):
    monkeypatch.setattr(graphs, "build_plan", None)
    loop, found = GraphLoop(monkeypatch, [4]), []
    run = loop.run

    def planned(step, decision, hooks):
        outcome = run(step, decision, hooks)
        found.append(
            (decision.selection.weights, outcome.draft.survival.clone(), outcome.plan.verify_lens[:3].tolist())
        )
        return outcome

    loop.run = planned
    weights = cycle([(0.01, 1.0, 1.0), None, (1.0, 1.0, 0.02)])
    decision = StepDecision(7, TopK(7))
    loop.schedule.choose = lambda *asked: replace(decision, selection=TopK(7, weights=next(weights)))
    assert loop.serve(prompts_of(loop), NUM_TOKENS) == expected(loop)
    assert all(loop.replayed)
    for used, survival, lens in found:
        ranked = survival if used is None else survival * torch.tensor(used)[:, None]
        assert lens == top_prefixes(ranked, 7).tolist()
    assert any(lens != top_prefixes(survival, 7).tolist() for _, survival, lens in found)


def test_the_next_step_finds_the_outcome_in_the_relay(monkeypatch):
    """Lengths and anchors, entered by the graph that judges; nothing is claimed where one only verifies."""
    relay = Relay(3, torch.device("cpu"))
    loop = GraphLoop(monkeypatch, [3], relay=relay, schedule="static", verify_len=3)
    assert loop.serve(prompts_of(loop), NUM_TOKENS) == expected(loop)
    buffers, last = relay.buffers, loop.outcomes[-1]
    assert [len(text) - 1 for text in loop.texts] == buffers.new_seq_lens.tolist()
    assert [text[-1] for text in loop.texts] == buffers.output_tokens.tolist()
    assert buffers.published_seq_lens is last.new_seq_lens and buffers.published_bonus is last.bonus_tokens
    sampled = GraphLoop(monkeypatch, [3], relay=relay, schedule="static", verify_len=3)
    sampled.serve(prompts_of(sampled), NUM_TOKENS, temperature=1.0)
    assert all(sampled.replayed) and buffers.published_bonus is last.bonus_tokens
    read = GraphLoop(monkeypatch, [3], relay=relay, schedule="static", verify_len=3)
    read.keeps_logits = True
    assert read.serve(prompts_of(read), NUM_TOKENS) == expected(read)
    assert all(read.replayed) and buffers.published_bonus is last.bonus_tokens


def test_an_outcome_that_nobody_relays_stays_as_it_is(monkeypatch):
    """Without overlap SGLang hands these tensors to the next step."""
    loop = GraphLoop(monkeypatch, [3], schedule="static", verify_len=3)
    assert loop.serve(prompts_of(loop), NUM_TOKENS) == expected(loop)
    assert all(loop.replayed) and len(loop.outcomes) > 2
    for outcome, before in zip(loop.outcomes, loop.copies, strict=True):
        assert torch.equal(outcome.bonus_tokens, before.bonus_tokens)
        assert torch.equal(outcome.new_seq_lens, before.new_seq_lens)


@pytest.mark.parametrize(
    ("decision", "numbers"),
    [
        (StepDecision(3, FixedLength()), (0, 3, -1)),
        (StepDecision(7, TopK(28)), (0, 7, -1)),
        (StepDecision(7, TopK(27)), (27, -1, -1)),
        (StepDecision(7, TopK(9, probe_request=0)), (9, -1, 0)),
        (StepDecision(7, TopK(9), with_confidence=False), None),
        (StepDecision(7, TopK(9), draft_requests=(1, 2)), None),
        (StepDecision(7, TopK(9), limits=RequestLimits((7, 1, 7, 7))), None),
        (StepDecision(7, Threshold(0.5)), None),
    ],
)
def test_what_a_captured_plan_can_do(decision, numbers):
    """Everything else is laid out by a launch."""
    assert decision.plan_numbers(4) == numbers


@pytest.mark.parametrize(
    "limits",
    [
        pytest.param(RequestLimits((7, 1, 0)), marks=pytest.mark.thorough),
        pytest.param(RequestLimits((7, 7, 7), (0.0, 0.6, 0.9)), marks=pytest.mark.thorough),
        RequestLimits((3, 7, 7), (0.5, 0.0, 0.6)),
    ],
    ids=["at most", "confidence", "both"],
)
def test_what_requests_ask_for_is_replayed_too(monkeypatch, limits):
    loop = GraphLoop(monkeypatch, [1, 2, 4], limits, schedule="static")
    assert loop.serve(prompts_of(loop), NUM_TOKENS) == expected(loop)
    assert all(loop.replayed)


def test_live_policies_and_large_batches_are_launched(monkeypatch):
    loop = GraphLoop(monkeypatch, [1, 2, 4], schedule="threshold", confidence_threshold=0.6)
    assert loop.serve(prompts_of(loop), NUM_TOKENS) == expected(loop)
    assert not any(loop.replayed)
    loop = GraphLoop(monkeypatch, [1, 2], schedule="static")
    assert loop.serve(prompts_of(loop), NUM_TOKENS) == expected(loop)
    assert not any(loop.replayed)


@pytest.mark.parametrize("seeds", [[1, 2, 3], []], ids=["seeded", "by step"])
def test_sampled_text_is_that_of_launched_steps(monkeypatch, seeds):
    """Noise is keyed by request and step, wherever these lie, and what candidates weigh is learned by both."""
    launched = StageLoop(schedule="static", lookup=True)
    loop = GraphLoop(monkeypatch, [4], schedule="static", lookup=True)
    launched.bounds = loop.bounds = [USUAL]
    texts = launched.serve(prompts_of(loop), NUM_TOKENS, temperature=1.0, seeds=seeds)
    assert loop.serve(prompts_of(loop), NUM_TOKENS, temperature=1.0, seeds=seeds) == texts
    assert loop.traces == launched.traces
    assert all(loop.replayed)


def staged(loop, decision, number=99):
    """Stage a step after the loop's texts; returns it and its executor."""
    step = loop.batch(number)
    executor = loop.executors.select(step, decision)
    assert executor.in_graphs
    executor.stage(step, decision)
    return step, executor


def test_a_draft_that_was_not_verified_is_drawn_anew(monkeypatch):
    """Earlier confidences of it must not decide whether it is verified."""
    loop, decision = GraphLoop(monkeypatch, [4], schedule="static"), StepDecision(7, FixedLength())
    loop.serve(prompts_of(loop), 2, temperature=2.0)
    drafts = []
    for number in (98, 99, 98):
        step, executor = staged(loop, decision, number)
        drafts.append(executor.draft(step, decision).block.tokens.clone())
    first, other, again = drafts
    assert torch.equal(first, again)
    assert not torch.equal(first, other)


def test_what_calibration_has_learned_reaches_replayed_steps(monkeypatch):
    loop, decision = GraphLoop(monkeypatch, [4]), StepDecision(7, TopK(9))
    loop.serve(prompts_of(loop), 2)
    for conditional in (0.5, 0.25):
        logit = torch.tensor(conditional).logit()
        forecast = loop.schedule.forecast
        forecast.packed_coefficients = torch.cat(
            [torch.zeros(1, 7), logit.expand(1, 7), forecast.packed_coefficients[2:]]
        )
        step, executor = staged(loop, decision)
        survival = executor.draft(step, decision).confidence.survival
        torch.testing.assert_close(survival, torch.full((3, 7), conditional).cumprod(1))


@pytest.mark.thorough
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_candidates_compete_in_replayed_steps(monkeypatch, tmp_path, temperature):
    """With a drafter that knows nothing, chains that weigh all spare steps where the text is in a loop."""
    folder = random_drafter(tmp_path, "gated")
    options = {"schedule": "static", "draft": folder, "lookup": True}
    loops = GraphLoop(monkeypatch, [4], **options), StageLoop(**options)
    prompts = [case["prompt_ids"] for case in CASES[:3]]
    steps: list[int] = []
    for loop in loops:
        weigh_all(loop)
    for bounds in ([(3, 5, 7, ASKED_ROWS), USUAL, NO_CHAINS], [NO_CHAINS], None):
        for loop in loops:
            loop.bounds = bounds
        texts = [loop.serve(prompts, 32, temperature) for loop in loops]
        assert texts[0] == texts[1] and loops[0].traces == loops[1].traces
        steps.append(len(loops[0].traces[0]))
    assert all(loops[0].replayed) and (steps[0] < steps[1] > steps[2] or temperature > 0)


def test_labels_are_looked_up_outside_graphs(monkeypatch, tmp_path):
    """Drafts with labels are launched, and verified in graphs; here the label is the answer."""
    folder = random_drafter(tmp_path, "gated")
    loop, case = GraphLoop(monkeypatch, [4], schedule="static", draft=folder, lookup=True), CASES[0]
    text = [-1, *case["output_ids"][:NUM_TOKENS], -1]
    needed = [9, *range(1, 9), *[8] * (NUM_TOKENS - 9), 9, 9]
    parts = (text, needed, [ASKED_ROWS] * len(text), [0] * len(text))
    loop.second = SecondTexts(*map(torch.tensor, parts))
    assert loop.serve([case["prompt_ids"]], NUM_TOKENS) == [case["output_ids"][:NUM_TOKENS]]
    assert all(loop.replayed) and max(kept for *_, kept in loop.traces[0]) == loop.gamma


def weigh_all(loop):
    """Have chains weigh all there is, whatever is seen."""
    weights = torch.full((2, NUM_ROWS, loop.gamma), 64.0)
    weights[:, 0], weights[1] = 0.0, -torch.inf
    loop.schedule.forecast._chains.table = lambda *args: weights.numpy()
    loop.schedule.forecast.renew()


@pytest.mark.parametrize("schedule", ["static", "threshold"])
def test_simulated_acceptance_follows_from_key_and_position(monkeypatch, schedule):
    """Launched and replayed, and whatever was verified before; confidences are its probabilities."""
    quantiles = torch.linspace(0, 1, QUANTILES).expand(7, -1).contiguous()
    draws = SimulatedDraws(torch.tensor([5, 77, 2**31]), quantiles)
    rows, limit = torch.arange(3), 0.5
    options = {"schedule": schedule, **({"confidence_threshold": limit} if schedule == "threshold" else {})}
    for loop in (StageLoop(**options), GraphLoop(monkeypatch, [4], **options)):
        loop.eager.draws = draws
        loop.serve(prompts_of(loop), NUM_TOKENS)
        for request, trace in enumerate(loop.traces):
            for start, _, drafts, accepted in trace:
                row, place = rows[request : request + 1], torch.tensor([start])
                kept = simulated_accept(draws, row, place, torch.tensor([drafts]), place).accept_lens
                sure = simulated_confidence(draws, row, place, 7).sigmoid()[0] >= limit
                verified = int(sure.long().cumprod(0).sum()) if schedule == "threshold" else 7
                assert accepted == min(int(kept), verified)
    assert all(loop.replayed) == (schedule == "static")


def test_every_switch_of_a_drafter_is_replayed(monkeypatch, tmp_path):
    """Layers with windows, causal blocks and sinks are laid out again from the buffers of each replay."""
    folder = random_drafter(tmp_path, "every-switch")
    loop = GraphLoop(monkeypatch, [4], schedule="static", draft=folder)
    launched = StageLoop(schedule="static", draft=folder)
    prompts = [case["prompt_ids"] for case in CASES[:3]]
    assert loop.serve(prompts, NUM_TOKENS) == launched.serve(prompts, NUM_TOKENS)
    assert loop.traces == launched.traces
    assert all(loop.replayed)
    assert len({tuple(drafts) for trace in loop.traces for _, _, drafts, _ in trace}) > 3


def test_drafts_that_were_made_elsewhere_are_verified(monkeypatch):
    """Step times are measured with tokens that differ, as those of experts depend on them."""
    loop = GraphLoop(monkeypatch, [4], schedule="static", verify_len=3)
    loop.serve(prompts_of(loop), 2)
    decision = StepDecision(3, FixedLength())
    step, executor = staged(loop, decision)
    tokens = torch.arange(9).view(3, 3) + 5
    plan = executor.plan(step, executor.use_external_draft(DraftOutput(DraftBlock(tokens), None, [3] * 3)), decision)
    rows = plan.input_ids[: int(plan.indptr[3])].view(3, 4)
    assert torch.equal(rows, torch.cat([step.anchors[:, None], tokens], dim=1))


@BY_BOTH
def test_layers_of_the_target_advance_by_what_was_accepted(monkeypatch, keeps_logits):
    """And by the anchor; those of padding, if there is any, have no rows."""
    loop = GraphLoop(monkeypatch, [4], schedule="static")
    loop.keeps_logits = keeps_logits
    assert loop.serve(prompts_of(loop), NUM_TOKENS) == expected(loop)
    assert [lengths[:3] for lengths in loop.advanced] == [(kept.accept_lens + 1).tolist() for kept in loop.copies]


@BY_BOTH
def test_features_write_before_every_verification_what_it_reads(monkeypatch, keeps_logits):
    done = []

    class Noted(Part):
        def captured(self, requests, rows):
            return self

        def stage(self, batch):
            done.append("staged")

    loop = GraphLoop(monkeypatch, [4], schedule="static", verify_len=3)
    loop.parts = [Noted(), Part()]
    loop.keeps_logits, verify = keeps_logits, loop.verify
    loop.verify = lambda *given: done.append("verified") or verify(*given)
    assert loop.serve(prompts_of(loop), NUM_TOKENS) == expected(loop)
    assert done == ["staged", "verified"] * len(loop.replayed)


def test_graphs_do_not_outlive_weights_that_moved():
    """They would go on reading where the old ones lie."""
    model, selector = torch.nn.Linear(2, 2), ExecutorSelector(None)
    worker = partly(
        DSparkWorker,
        _target_worker=target_worker(model=model),
        drafter=NoDrafter(DSparkConfig(draft_free=True), 5, CPU),
        control=StepControl(schedule(), None, (), on_gpu=True),
        executors=selector,
        linear_layers=None,
    )
    worker.captured_at, selector.captured = worker.addresses(), "graphs"
    model.weight.data.copy_(torch.ones(2, 2))
    worker.weights_changed()
    assert selector.captured == "graphs"
    model.weight = torch.nn.Parameter(torch.zeros(2, 2))
    worker.weights_changed()
    assert selector.captured is None
