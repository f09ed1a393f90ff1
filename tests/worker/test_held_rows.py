"""Rows of plain steps whose draft K/V is computed together: drafts behind them are those of steps that compute it."""

import pytest
import torch
from dspark_kernels import AcceptResult, kernels_anywhere, plan_uniform
from graph_loop import GraphLoop, prompts_of
from launches import counting, one
from stage_loop import StageLoop
from triton.runtime.interpreter import InterpretedFunction

from sglang_dspark.step.decision import PLAIN, StepDecision
from sglang_dspark.step.selection import FixedLength
from sglang_dspark.step.state import VerifyPlan
from sglang_dspark.worker import drafter

NUM_TOKENS = 40
WHOLE = StepDecision(7, FixedLength())


@pytest.fixture(autouse=True)
def small_ring(monkeypatch):
    """It holds four steps."""
    monkeypatch.setattr(drafter, "_HELD", 16)
    monkeypatch.setattr(drafter, "_STEP", 4)


def decoded(loop, holds, plain):
    """Return the loop's texts and traces, and how many rows are held before each step.

    Args:
        plain: steps that draft nothing; all others draft whole blocks.
    """
    numbers, held, run = iter(range(1000)), [], loop._run
    loop.schedule.choose = lambda *asked, **given: PLAIN if next(numbers) in plain else WHOLE

    def noted(step, decision, hooks):
        if holds and not held:
            loop.drafter.hold_rows()
            if isinstance(loop, GraphLoop):
                loop.start_graphs()
                loop.drafter.forget_held()
        held.append(loop.drafter.held)
        return run(step, decision, hooks)

    loop._run = noted
    texts = loop.serve(prompts_of(loop), NUM_TOKENS)
    return texts, loop.traces, held


def pools(loop):
    return loop.drafter.cache.k[:, 1:], loop.drafter.cache.v[:, 1:]


@pytest.mark.parametrize("plain", [range(9), {*range(3, 6), *range(7, 10)}], ids=["first", "between"])
@pytest.mark.parametrize("replays", [False, True], ids=["launched", "replayed"])
def test_drafts_behind_plain_steps(monkeypatch, replays, plain):
    """Also where more steps are plain than a ring holds, and where a row of padding is held beside three real ones."""

    def made():
        return GraphLoop(monkeypatch, [4], schedule="static") if replays else StageLoop(schedule="static")

    loops = made(), made()
    texts, traces, held = decoded(loops[0], True, plain)
    assert max(held) == min(12, (4 if replays else 3) * (len(plain) - 3 * isinstance(plain, set)))
    expected, rounds, none = decoded(loops[1], False, plain)
    assert (texts, traces) == (expected, rounds) and not any(none)
    assert any(kept for *_, kept in traces[0])
    for found, right in zip(*map(pools, loops), strict=True):
        torch.testing.assert_close(found, right)


def test_prompts_may_have_the_slots_of_rows_that_are_held():
    loop = StageLoop(schedule="off")
    decoded(loop, True, range(1000))
    assert loop.drafter.held > 0
    slots = loop._table[0, : len(loop.texts[0])].long()
    features = loop.target(loop.texts[1])[1][: len(slots)]
    loop.drafter.inject(torch.tensor([0]), features, torch.arange(len(features)), slots[: len(features)])
    before = [pool.clone() for pool in pools(loop)]
    loop.drafter.settle()
    assert all(map(torch.equal, pools(loop), before))


def commit_launches(holds):
    """Return what the commit of a plain step launches, by kind."""
    loop = StageLoop(schedule="off")
    loop.serve(prompts_of(loop), 1)
    if holds:
        loop.drafter.hold_rows()
    step = loop._batch(1)
    plan = VerifyPlan.of(plan_uniform(0, step.anchors[:, None][:, :0], step.requests, len(step)), 1)
    zeros = torch.zeros(len(step), dtype=torch.int64)
    accepted, captured = (
        AcceptResult(zeros, zeros, zeros[:, None], zeros),
        torch.zeros(3, loop.drafter.model.fc.in_features),
    )
    launch = InterpretedFunction.run

    def counted(self, *args, **kwargs):
        with one("kernel"):
            launch(self, *args, **kwargs)

    with pytest.MonkeyPatch.context() as patch, kernels_anywhere(), torch.no_grad(), counting("a commit") as counts:
        patch.setattr(InterpretedFunction, "run", counted)
        loop.drafter.commit(plan, accepted, captured)
    return dict(counts)


def test_a_row_that_is_held_costs_two_launches():
    """Beside the one that keeps its token: nothing is projected."""
    projected, held = commit_launches(False), commit_launches(True)
    assert projected["aten.mm.default"] == 2 and projected["kernel"] == 1
    assert held == {"aten.index_put_.default": 1, "kernel": 1, "aten.add_.Tensor": 1}
