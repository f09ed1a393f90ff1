"""Hooks on functions that SGLang still has and no longer calls."""

import os

import pytest
from sglang_objects import partly

from sglang_dspark.engine import hooks
from sglang_dspark.engine.hooks import Moment, check, expect_called
from sglang_dspark.engine.worker_base import SpecWorkerBase
from sglang_dspark.errors import EngineError
from sglang_dspark.worker.worker import DSparkWorker


@pytest.fixture(autouse=True)
def nothing_expected(monkeypatch):
    monkeypatch.setattr(hooks, "_expected", type(hooks._expected)(dict))


def test_a_hook_that_was_never_called_is_named():
    called = expect_called("called", "sglang.called", Moment.READY, lambda x: x + 1)
    expect_called("dead", "sglang.dead", Moment.READY, lambda x: x)
    expect_called("later", "sglang.later", Moment.ANSWERED, lambda x: x)
    assert called(1) == 2
    with pytest.raises(
        EngineError, match=r"had not called sglang\.dead when the scheduler was ready, so the hook dead"
    ):
        check(Moment.READY)


def test_hooks_that_were_called_pass():
    called = expect_called("called", "sglang.called", Moment.READY, lambda: None)
    expect_called("whenever", "sglang.whenever", Moment.SOME_TIME, lambda: None)
    called()
    check(Moment.READY)
    check(Moment.ANSWERED)


def test_a_forked_process_waits_for_its_own_hooks_alone():
    expect_called("of the parent", "sglang.dead", Moment.READY, lambda: None)
    child = os.fork()
    if child == 0:
        try:
            check(Moment.READY)
        except EngineError:
            os._exit(1)
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
    with pytest.raises(EngineError):
        check(Moment.READY)


def test_hooks_are_looked_for_when_a_step_has_been_processed():
    expect_called("dead", "sglang.dead", Moment.ANSWERED, lambda: None)
    with pytest.raises(EngineError, match="when the first request had been answered"):
        SpecWorkerBase.observe(partly(DSparkWorker), result=None, batch=None)
