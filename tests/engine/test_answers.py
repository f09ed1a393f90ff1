"""The core looks at the answers of a server on their way out."""

import asyncio
from types import SimpleNamespace

import pytest

from sglang_dspark.engine.api import hook_handlers as module
from sglang_dspark.engine.api.hook_handlers import look_at_answers
from sglang_dspark.engine.hook_checks import Moment


@pytest.mark.parametrize(("reason", "looked"), [("stop", True), ("length", True), ("abort", False)])
def test_hooks_are_looked_for_with_the_first_answer_that_was_decoded(reason, looked, monkeypatch):
    """One that was aborted while it waited has not been where the others are."""
    moments = []
    monkeypatch.setattr(module, "check", moments.append)

    async def answers():
        yield {"meta_info": {"finish_reason": None}}
        assert moments == []
        yield {"meta_info": {"finish_reason": {"type": reason}}}

    async def number():
        return len([answer async for answer in look_at_answers(answers(), None, SimpleNamespace(), None)])

    assert asyncio.run(number()) == 2
    assert moments == [Moment.ANSWERED] * looked
