"""The needs of a drafter are noted at the place that this SGLang reads."""

import inspect
from types import SimpleNamespace

import pytest
import torch
from sglang.srt.configs.model_config import AttentionArch
from sglang.srt.mem_cache.kv_cache_configurator import KVCacheConfigurator
from sglang.srt.model_executor import pool_configurator
from sglang.srt.model_executor.model_runner import ModelRunner
from sglang.srt.model_executor.model_runner_components.spec_aux_hidden_state import SpecAuxHiddenStateConfig
from sglang.srt.model_executor.pool_configurator import DefaultPoolConfigurator, HybridSWAPoolConfigurator
from sglang.srt.speculative.spec_info import SpeculativeAlgorithm
from sglang_objects import GOLDEN, model_config, partly, runner, server_args

from sglang_dspark.config import DSparkConfig
from sglang_dspark.draft.weights import ResolvedDrafter
from sglang_dspark.engine import target
from sglang_dspark.engine.server import DSparkServer, attach
from sglang_dspark.errors import EngineError


def test_wishes_reach_the_one_place_that_is_read():
    functions = [inspect.unwrap(function) for _, function in inspect.getmembers(ModelRunner, inspect.isfunction)]
    assert any("spec_aux_config" in function.__code__.co_names for function in functions)
    wishing = runner(spec_aux_config=(wishes := SpecAuxHiddenStateConfig()))
    target.request_capture(wishing, (1, 2))
    assert (wishes.dflash_use_aux_hidden_state, wishes.dflash_target_layer_ids) == (True, [1, 2])


@pytest.mark.parametrize("attributes", [{}, {"spec_aux_config": object()}])
def test_wishes_that_nobody_reads_end_the_start(attributes):
    with pytest.raises(EngineError, match=r"has no dflash_use_aux_hidden_state in its"):
        target.request_capture(runner(**attributes), (1, 2))


def of_layers_with_windows(configurator, monkeypatch):
    """Return SGLang's size of a token in pools of heads of two sizes."""
    return HybridSWAPoolConfigurator(configurator)._cell_size


def of_layers_alike(configurator, monkeypatch):
    monkeypatch.setattr(DefaultPoolConfigurator, "_compute_cell_size", lambda self, configurator, layers: 1000)
    monkeypatch.setattr(pool_configurator, "mambaish_config", lambda config: None)
    monkeypatch.setattr(pool_configurator, "compute_page_shard_scratch_bytes", lambda *given, **named: 0)
    return DefaultPoolConfigurator(configurator)._cell_size


@pytest.fixture
def configurator(monkeypatch):
    """SGLang's, of a target with four layers, three of them with windows."""
    for name, settings in (
        ("get_parallel", {"attn_tp_size": 1, "attn_dcp_size": 1}),
        ("get_schedule", {"swa_full_tokens_ratio": 0.5, "max_total_tokens": 100}),
        ("get_memory", {"enable_unified_memory": False}),
    ):
        monkeypatch.setattr(pool_configurator, name, lambda settings=settings: SimpleNamespace(**settings))
    monkeypatch.setattr(KVCacheConfigurator, "fused_entry_bytes", lambda self, kind: None)
    heads = {"head_dim": 32, "v_head_dim": 32, "swa_head_dim": 16, "swa_v_head_dim": 16}
    counts = {"get_num_kv_heads": lambda *ranks: 2, "get_swa_num_kv_heads": lambda *ranks: 4}
    layers = SimpleNamespace(full_attention_layer_ids=[3], swa_attention_layer_ids=[0, 1, 2], num_effective_layers=4)
    dtypes = {"model_dtype": torch.bfloat16, "kv_cache_dtype": torch.float8_e4m3fn, "kv_cache_dtype_str": "auto"}
    made = partly(KVCacheConfigurator, **dtypes, is_draft_worker=False, page_size=1, sliding_window_size=8)
    made.model_config = model_config(attention_arch=AttentionArch.MHA, **counts, **heads)
    made.server_args, made.layer_info = server_args(), layers
    made.dflash_draft_cell_size_per_token, made.spec_aux_config = None, SpecAuxHiddenStateConfig()
    made.spec_algorithm = SpeculativeAlgorithm.DFLASH
    return made


@pytest.mark.parametrize("token_size", [of_layers_alike, of_layers_with_windows])
def test_a_token_of_the_pool_has_room_for_its_draft_kv(token_size, configurator, monkeypatch):
    """The room is counted in bytes, because the layers of drafter and target differ in size."""
    without = token_size(configurator, monkeypatch)
    attach(configurator.server_args, DSparkServer(DSparkConfig(), None, dummy_draft=False))
    target.make_room(configurator, pre_model_load_memory=0)
    assert token_size(configurator, monkeypatch) == without
    drafter = ResolvedDrafter.read(GOLDEN / "vanilla_g7")
    attach(configurator.server_args, DSparkServer(DSparkConfig(), drafter, dummy_draft=False))
    target.make_room(configurator, pre_model_load_memory=0)
    config = drafter.config
    elements = 2 * config.num_hidden_layers * config.num_key_value_heads * config.head_dim
    assert token_size(configurator, monkeypatch) == without + 2 * elements + 8  # in 16 bits, and the token itself
