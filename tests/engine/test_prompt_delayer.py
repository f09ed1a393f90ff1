"""The rule for holding prompts back, where SGLang asks for one."""

from inspect import signature
from types import SimpleNamespace

import pytest
from sglang.srt.managers.min_free_slots_delayer import MinFreeSlotsDelayer

from sglang_dspark.config import DSparkConfig
from sglang_dspark.engine.compat.arguments import attach
from sglang_dspark.engine.scheduler.prompt_delayer import PromptDelayer, install
from sglang_dspark.engine.settled import Serving


def scheduler_with(*, ours):
    worker = SimpleNamespace(holds_prompts=lambda running: running > 3)
    theirs = MinFreeSlotsDelayer(2)
    arguments = SimpleNamespace()
    attach(arguments, Serving(DSparkConfig(), None, dummy_draft=False, holds_prompts=ours))
    return SimpleNamespace(server_args=arguments, draft_worker=worker, min_free_slots_delayer=theirs)


@pytest.mark.parametrize(("running", "held"), [(3, False), (4, True)])
def test_the_worker_is_asked(running, held):
    scheduler = scheduler_with(ours=True)
    install(None, scheduler)
    assert scheduler.min_free_slots_delayer.should_delay(running_bs=running, num_allocatable_reqs=9) == held


def test_a_rule_that_the_user_has_chosen_stays():
    scheduler = scheduler_with(ours=False)
    before = scheduler.min_free_slots_delayer
    install(None, scheduler)
    assert scheduler.min_free_slots_delayer is before


def test_it_is_asked_as_theirs_is():
    """A keyword that SGLang renames would be an error in the first busy moment of a server."""
    assert signature(PromptDelayer.should_delay).parameters.keys() == (
        signature(MinFreeSlotsDelayer.should_delay).parameters.keys()
    )
