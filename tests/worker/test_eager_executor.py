"""Tests of the served stages without a server: what the golden pair drafts, accepts and writes.

Non-speculative steps may hold their rows back. An exception names its stage in the log, and nothing is handed out.
"""

import logging
from types import SimpleNamespace

import pytest
import torch
from dspark_kernels import AcceptResult, kernels_anywhere, plan_uniform
from launches import counting, one
from sglang.srt.model_executor.forward_batch_info import ForwardMode
from sglang_objects import batch, decoder, request
from stage_loop import GraphLoop, StageLoop, prompts_of
from step_tables import make_table
from triton.runtime.interpreter import InterpretedFunction

from sglang_dspark.draft.backbone import DraftWindow
from sglang_dspark.engine.scheduler import failed_stage
from sglang_dspark.step.decision import PLAIN, StepDecision
from sglang_dspark.step.selection import FixedLength
from sglang_dspark.step.state import VerifyPlan
from sglang_dspark.worker import drafter, eager

NUM_TOKENS = 24
# Verifying a draft costs a tenth of a non-speculative step, drafting another tenth.
TABLE = make_table(lambda r, d, c: 10 + d * r, lambda r, d, c: 1.0 * r, gamma=7)


def loop_prompts(loop: StageLoop) -> list[list[int]]:
    return [case.prompt_ids for case in loop.golden.cases]


def test_the_golden_rounds_are_decoded_in_one_batch():
    """Requests of different lengths side by side: drafts, accepted counts and texts of the checkpoint's own code."""
    loop = StageLoop(schedule="static")
    outputs = loop.serve(loop_prompts(loop), NUM_TOKENS)
    compared = 0
    for case, output, trace in zip(loop.golden.cases, outputs, loop.traces, strict=True):
        length = min(NUM_TOKENS, len(case.output_ids))
        assert output[:length] == case.output_ids[:length]
        for expected, got in zip(case.rounds, trace, strict=False):
            if loop.golden.ends_at_limit(case, expected) or got[0] + loop.gamma >= len(case.prompt_ids) + length:
                break
            assert got == (expected.start, expected.anchor, expected.draft, expected.accepted)
            compared += 1
    assert compared > 10


@pytest.mark.slow
def test_kernels_decode_the_golden_rounds():
    """The stages as on a GPU, under Triton's interpreter: laid out, drafted, judged and committed by kernels."""
    loop = StageLoop(schedule="static")
    case = loop.golden.cases[0]
    with kernels_anywhere():
        (output,) = loop.serve(loop_prompts(loop)[:1], 8)
    assert output[:8] == case.output_ids[:8]
    rounds = list(zip(case.rounds, loop.traces[0], strict=False))
    assert len(rounds) > 1
    for expected, got in rounds[:-1]:
        assert got == (expected.start, expected.anchor, expected.draft, expected.accepted)


@pytest.mark.parametrize(
    "options",
    [
        {"schedule": "off"},
        {"schedule": "static", "verify_len": 1},
        {"schedule": "threshold", "confidence_threshold": 0.5},
        {"schedule": "early-stop"},
        {},
    ],
    ids=lambda options: options.get("schedule", "auto"),
)
def test_greedy_text_is_the_same_under_every_policy(options):
    loop = StageLoop(TABLE, **options)
    expected = [case.output_ids[:NUM_TOKENS] for case in loop.golden.cases]
    outputs = loop.serve(loop_prompts(loop), NUM_TOKENS)
    assert [output[: len(text)] for output, text in zip(outputs, expected, strict=True)] == expected


def test_seeded_text_is_the_same_whatever_is_verified():
    texts = []
    for verify_len in (0, 2, 7):
        loop = StageLoop(schedule="static", verify_len=verify_len)
        texts.append(loop.serve(loop_prompts(loop)[:3], 10, temperature=1.0, seeds=range(3)))
    assert texts[0] == texts[1] == texts[2]
    greedy = [case.output_ids[:10] for case in loop.golden.cases[:3]]
    assert [text[: len(expected)] for text, expected in zip(texts[0], greedy, strict=True)] != greedy


def served_within(window):
    """Texts and traces of two golden prompts."""
    loop = StageLoop(schedule="static")
    loop.drafter.window = window
    prompts = [case.prompt_ids for case in loop.golden.cases[:2]]
    return loop.serve(prompts, 10), loop.traces


@pytest.fixture(scope="module")
def whole():
    return served_within(None)


def test_a_window_of_the_whole_context_changes_nothing(whole):
    assert served_within(DraftWindow(500, 4)) == whole


def test_a_narrow_window_changes_only_drafts(whole):
    texts, traces = served_within(DraftWindow(3, 1))
    assert texts == whole[0]
    assert traces != whole[1]


NAN = float("nan")
VOCAB_SIZE = 256


def served(loop, num_tokens=12):
    """Texts of the golden prompts, and those of the target alone."""
    cases = loop.golden.cases
    outputs = loop.serve([case.prompt_ids for case in cases], num_tokens)
    expected = [case.output_ids[:num_tokens] for case in cases]
    return [output[: len(text)] for output, text in zip(outputs, expected, strict=True)], expected


POLICIES = [{"schedule": "early-stop"}, {}]


@pytest.mark.slow
@pytest.mark.parametrize("options", POLICIES, ids=lambda options: options.get("schedule", "auto"))
@pytest.mark.parametrize("part", ["drafter", "confidence head"])
def test_a_broken_drafter_costs_time_and_no_text(options, part):
    """And nothing is learned from it."""
    loop = StageLoop(TABLE, **options)
    model = loop.drafter.model
    for parameter in (model if part == "drafter" else model.confidence_head).parameters():
        parameter.data.fill_(NAN)
    outputs, expected = served(loop)
    assert outputs == expected
    assert set(loop.schedule.report()["calibration"]["pairs"]) == {0}


def test_nan_of_the_target_stays_with_its_request():
    loop = StageLoop(schedule="static")
    verify = loop.verify

    def broken(step, plan):
        output = verify(step, plan)
        start, stop = plan.indptr[:2].tolist()
        output.logits_output.next_token_logits[start:stop] = NAN
        return output

    loop.eager.forward = broken
    outputs, expected = served(loop)
    assert outputs[0] != expected[0]
    assert outputs[1:] == expected[1:]
    assert all(0 <= token < VOCAB_SIZE for token in outputs[0])


HELD_TOKENS = 40
WHOLE = StepDecision(7, FixedLength())


@pytest.fixture
def small_ring(monkeypatch):
    """It holds four steps."""
    monkeypatch.setattr(drafter, "_HELD", 16)
    monkeypatch.setattr(drafter, "_STEP", 4)


def decoded(loop, holds, plain):
    """Return the loop's texts and traces, and how many rows are held before each step.

    Args:
        plain: steps that draft nothing; all others draft whole blocks.
    """
    numbers, held, run = iter(range(1000)), [], loop.run
    loop.schedule.choose = lambda *asked, **given: PLAIN if next(numbers) in plain else WHOLE

    def noted(step, decision, hooks):
        if holds and not held:
            loop.drafter.hold_rows()
            if isinstance(loop, GraphLoop):
                loop.start_graphs()
                loop.drafter.forget_held()
        held.append(loop.drafter.held)
        return run(step, decision, hooks)

    loop.run = noted
    texts = loop.serve(prompts_of(loop), HELD_TOKENS)
    return texts, loop.traces, held


def pools(loop):
    return loop.drafter.cache.k[:, 1:], loop.drafter.cache.v[:, 1:]


@pytest.mark.usefixtures("small_ring")
@pytest.mark.parametrize("plain", [range(9), {*range(3, 6), *range(7, 10)}], ids=["first", "between"])
@pytest.mark.parametrize("replays", [False, True], ids=["launched", "replayed"])
def test_drafts_after_plain_steps(monkeypatch, replays, plain):
    """Also where more steps are plain than a ring holds, and where a row of padding is held next to three real ones."""

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


@pytest.mark.usefixtures("small_ring")
def test_prompts_may_have_the_slots_of_rows_that_are_held():
    loop = StageLoop(schedule="off")
    decoded(loop, True, range(1000))
    assert loop.drafter.held > 0
    slots = loop.table[0, : len(loop.texts[0])].long()
    features = loop.target(loop.texts[1])[1][: len(slots)]
    loop.drafter.inject(torch.tensor([0]), features, torch.arange(len(features)), slots[: len(features)])
    before = [pool.clone() for pool in pools(loop)]
    loop.drafter.settle()
    assert all(map(torch.equal, pools(loop), before))


def commit_launches(holds):
    """Return what the commit of a non-speculative step launches, by kind."""
    loop = StageLoop(schedule="off")
    loop.serve(prompts_of(loop), 1)
    if holds:
        loop.drafter.hold_rows()
    step = loop.batch(1)
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


@pytest.mark.usefixtures("small_ring")
def test_a_row_that_is_held_costs_two_launches():
    """Next to the one that keeps its token: nothing is projected."""
    projected, held = commit_launches(False), commit_launches(True)
    assert projected["aten.mm.default"] == 2 and projected["kernel"] == 1
    assert held == {"aten.index_put_.default": 1, "kernel": 1, "aten.add_.Tensor": 1}


# What each stage calls.
CALLED = {
    "draft": lambda loop: (loop.drafter, "propose"),
    "plan": lambda loop: (eager, "build_plan"),
    "verify": lambda loop: (loop.eager, "forward"),
    "accept": lambda loop: (eager, "accept"),
    "commit": lambda loop: (loop.drafter, "commit"),
}


def nothing(*args, **kwargs):
    return None


class WorkerLoop(StageLoop):
    """Decodes by ``DSparkWorker.forward_batch_generation``, on the real executor.

    Attributes:
        published: lengths that were handed to the scheduler.
    """

    def __init__(self):
        super().__init__(schedule="static")
        self.published = []
        self.worker = decoder(self, schedule="static")
        self.worker.read = lambda batch, adjusted: self.batch(self.worker.step)

    def step(self, number):
        reqs = [request(rid=f"r{place}") for place in range(len(self.texts))]
        running = batch(*reqs, forward_mode=ForwardMode.DECODE, is_extend_in_batch=False, has_grammar=False)
        running.spec_info = SimpleNamespace(room=None)
        self.worker.forward_batch_generation(running, on_publish=self.published.append)


def failed(stage, error, caplog, monkeypatch):
    """Return a loop in whose first step something below ``stage`` has raised ``error``."""
    loop = WorkerLoop()
    caplog.clear()

    def fail(*args, **kwargs):
        raise error

    monkeypatch.setattr(*CALLED[stage](loop), fail)
    with caplog.at_level(logging.ERROR), pytest.raises(type(error)) as raised:
        loop.serve([case.prompt_ids for case in loop.golden.cases[:3]], 8)
    assert raised.value is error
    return loop


@pytest.mark.parametrize("stage", CALLED)
def test_the_log_names_the_stage_that_failed(stage, caplog, monkeypatch):
    loop = failed(stage, RuntimeError("a kernel went wrong"), caplog, monkeypatch)
    [record] = caplog.records
    expected = f"step 1 of 3 requests failed in decode: {stage} (RuntimeError: a kernel went wrong)"
    assert expected in record.getMessage()
    # Lengths are known to the scheduler when the outcome is, and no sooner; no token is.
    assert len(loop.published) == (stage == "commit")
    assert [len(trace) for trace in loop.traces] == [0, 0, 0]


@pytest.mark.parametrize(
    ("error", "remedy"),
    [
        (torch.OutOfMemoryError("tried to allocate 1.1 GiB"), "lower --mem-fraction-static or --max-running-requests"),
        (torch.AcceleratorError("device-side assert", 710), "CUDA_LAUNCH_BLOCKING=1"),
    ],
    ids=["memory", "device"],
)
def test_faults_of_the_device_come_with_a_remedy(error, remedy, caplog, monkeypatch):
    failed("accept", error, caplog, monkeypatch)
    assert remedy in caplog.text
    assert str(error) in caplog.text


def test_what_fails_before_a_step_begins_has_no_stage():
    assert failed_stage(RuntimeError()) == "its preparation"
