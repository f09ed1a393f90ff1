"""The needs of a drafter are noted at the place that this SGLang reads."""

import inspect
from types import SimpleNamespace

import pytest
from sglang.srt.model_executor.model_runner import ModelRunner
from sglang.srt.model_executor.model_runner_components.spec_aux_hidden_state import SpecAuxHiddenStateConfig

from sglang_dspark.engine.compat import pools
from sglang_dspark.errors import EngineError


def test_wishes_reach_the_one_place_that_is_read():
    functions = [inspect.unwrap(function) for _, function in inspect.getmembers(ModelRunner, inspect.isfunction)]
    assert any("spec_aux_config" in function.__code__.co_names for function in functions)
    runner = SimpleNamespace(spec_aux_config=SpecAuxHiddenStateConfig())
    pools.request_capture(runner, (1, 2))
    pools.make_room(runner, 3)
    wishes = runner.spec_aux_config
    assert (wishes.dflash_use_aux_hidden_state, wishes.dflash_target_layer_ids) == (True, [1, 2])
    assert wishes.dflash_draft_num_layers == 3


@pytest.mark.parametrize("runner", [SimpleNamespace(), SimpleNamespace(spec_aux_config=SimpleNamespace())])
def test_wishes_that_nobody_reads_end_the_start(runner):
    with pytest.raises(EngineError, match=r"has no spec_aux_config\.dflash_draft_num_layers in its SimpleNamespace"):
        pools.make_room(runner, 3)
    with pytest.raises(EngineError, match=r"has no spec_aux_config\.dflash_use_aux_hidden_state"):
        pools.request_capture(runner, (1, 2))
