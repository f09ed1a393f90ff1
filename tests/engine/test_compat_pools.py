"""What a drafter wants of the target's runner is noted where this SGLang reads it."""

import inspect
from importlib import import_module
from types import SimpleNamespace

import pytest
from sglang.srt.model_executor.model_runner import ModelRunner

from sglang_dspark.engine.compat import pools
from sglang_dspark.errors import EngineError

RECORD = "sglang.srt.model_executor.model_runner_components.spec_aux_hidden_state"


def fresh_runner():
    """Whatever attributes SGLang's class names, and the record of its own where it makes one."""
    functions = [function for _, function in inspect.getmembers(ModelRunner, inspect.isfunction)]
    runner = SimpleNamespace(**dict.fromkeys(name for f in functions for name in inspect.unwrap(f).__code__.co_names))
    if hasattr(runner, "spec_aux_config"):
        runner.spec_aux_config = import_module(RECORD).SpecAuxHiddenStateConfig()
    return runner


def test_wishes_reach_the_one_place_that_is_read():
    runner = fresh_runner()
    before = set(vars(runner))
    pools.request_capture(runner, (1, 2))
    pools.make_room(runner, 3)
    assert set(vars(runner)) == before, "wishes that nobody reads"
    wishes = getattr(runner, "spec_aux_config", runner)
    assert (wishes.dflash_use_aux_hidden_state, wishes.dflash_target_layer_ids) == (True, [1, 2])
    assert wishes.dflash_draft_num_layers == 3


@pytest.mark.parametrize("runner", [SimpleNamespace(), SimpleNamespace(spec_aux_config=SimpleNamespace())])
def test_wishes_that_nobody_reads_end_the_start(runner):
    with pytest.raises(EngineError, match="has no dflash_draft_num_layers in its SimpleNamespace"):
        pools.make_room(runner, 3)
    with pytest.raises(EngineError, match="has no dflash_use_aux_hidden_state"):
        pools.request_capture(runner, (1, 2))
