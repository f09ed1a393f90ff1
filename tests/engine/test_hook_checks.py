"""Hooks on functions that SGLang still has and no longer calls."""

import os
from types import SimpleNamespace

import pytest

from sglang_dspark.engine import hook_checks
from sglang_dspark.engine.hook_checks import Moment, check, expect_called
from sglang_dspark.engine.scheduler.first_answer import FirstAnswer
from sglang_dspark.errors import EngineError


@pytest.fixture(autouse=True)
def nothing_expected(monkeypatch):
    monkeypatch.setattr(hook_checks, "_expected", type(hook_checks._expected)(dict))


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


def request(tokens=5, reason=None):
    """A request that has ended for this reason, or runs."""
    ended = None if reason is None else SimpleNamespace(to_json=lambda: {"type": reason})
    return SimpleNamespace(output_ids=[1] * tokens, finished_reason=ended, finished=lambda: reason is not None)


def end(req, reason):
    vars(req).update(vars(request(reason=reason)))


def test_the_first_answer_is_waited_for():
    expect_called("dead", "sglang.dead", Moment.ANSWERED, lambda: None)
    first, req = FirstAnswer(), request()
    first.look([req])
    first.look([req])
    end(req, "length")
    with pytest.raises(EngineError, match="when the first request had been answered"):
        first.look([request()])


@pytest.mark.parametrize(("tokens", "reason"), [(5, "abort"), (1, "length")])
def test_a_request_without_a_step_of_its_own_says_nothing(tokens, reason):
    expect_called("dead", "sglang.dead", Moment.ANSWERED, lambda: None)
    first, req = FirstAnswer(), request()
    first.look([req])
    end(req, reason)
    req.output_ids = [1] * tokens
    other = request()
    first.look([req, other])
    first.look([other])
    end(other, "stop")
    with pytest.raises(EngineError):
        first.look([])


def test_a_hook_is_looked_for_once():
    first, req = FirstAnswer(), request()
    first.look([req])
    end(req, "stop")
    first.look([])
    expect_called("dead", "sglang.dead", Moment.ANSWERED, lambda: None)
    first.look([request()])
    first.look([])
