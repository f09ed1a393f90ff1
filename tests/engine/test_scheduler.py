"""Tests of what a server does when SGLang's scheduler is told to pause, and of requests that features answer."""

from types import SimpleNamespace

from sglang.srt.managers.io_struct import ContinueGenerationReqInput
from sglang_objects import partly
from step_tables import schedule

from sglang_dspark.engine import scheduler as core
from sglang_dspark.engine.feature import Feature
from sglang_dspark.engine.scheduler import answer_requests, answer_with
from sglang_dspark.worker.worker import DSparkWorker


def listening(monkeypatch, *features):
    """Return SGLang's scheduler, and what it does when an operator ends a pause."""
    monkeypatch.setattr(core, "all_features", lambda: features)
    mapping = {ContinueGenerationReqInput: lambda asked: None}
    scheduler = SimpleNamespace(
        server_args=None,
        draft_worker=partly(DSparkWorker, schedule=schedule()),
        _request_dispatcher=SimpleNamespace(_mapping=mapping),
    )
    answer_requests(None, scheduler)
    return scheduler, lambda: mapping[ContinueGenerationReqInput](ContinueGenerationReqInput())


def test_a_pause_is_not_the_time_of_a_step(monkeypatch):
    """Also on a server that no feature is used on."""
    scheduler, continue_generation = listening(monkeypatch)
    steps, timed = scheduler.draft_worker.schedule, []
    for paused in (False, False, True, False):
        if paused:
            continue_generation()
        decision = steps.choose(["r0"], 100.0)
        timed.append(steps.last_time is not None)
        steps.end_step(decision, 1, 1)
    assert timed == [False, True, False, True]


def test_features_that_are_used_answer_requests_around_the_core(monkeypatch):
    called = []

    def answers(name):
        def ours(original, owner, asked):
            called.append(name)
            original(asked)

        return lambda scheduler: answer_with(scheduler, ContinueGenerationReqInput, ours, None)

    features = [
        Feature(name, lambda args, used=name != "unused": used, answers=answers(name)) for name in ("used", "unused")
    ]
    scheduler, continue_generation = listening(monkeypatch, *features)
    steps = scheduler.draft_worker.schedule
    steps.end_step(steps.choose(["r0"], 100.0), 1, 1)
    continue_generation()
    steps.choose(["r0"], 100.0)
    assert called == ["used"] and steps.last_time is None
