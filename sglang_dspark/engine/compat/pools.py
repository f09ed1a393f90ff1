"""Ask SGLang for what a drafter needs: the target's hidden states, and room beside its K/V pools."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from functools import partial
from typing import TYPE_CHECKING

import torch
from sglang.srt.constants import GPU_MEMORY_TYPE_CUDA_GRAPH, GPU_MEMORY_TYPE_KV_CACHE, GPU_MEMORY_TYPE_WEIGHTS
from sglang.srt.environ import envs
from sglang.srt.plugins.hook_registry import HookType

from sglang_dspark.draft.cache import bytes_per_token
from sglang_dspark.engine.compat.arguments import attached_to_ours
from sglang_dspark.engine.hooks import Moment, hook
from sglang_dspark.engine.sglang_types import ModelRunner
from sglang_dspark.engine.support import installed_sglang
from sglang_dspark.errors import EngineError

if TYPE_CHECKING:
    from sglang.srt.mem_cache.kv_cache_configurator import KVCacheConfigurator

_RECORD = "spec_aux_config"


def _wish(owner: object, name: str, value: object) -> None:
    # One that SGLang reads elsewhere would go unnoticed until the first prefill, or until the memory is full.
    if not hasattr(owner, name):
        raise EngineError(
            f"sglang {installed_sglang()} has no {name} in its {type(owner).__name__}, where a drafter asks "
            "for hidden states and for memory; sglang-dspark cannot serve on this release as it is"
        )
    setattr(owner, name, value)


def request_capture(runner: ModelRunner, layers: Sequence[int]) -> None:
    """Have the target's forwards return the outputs of these layers, 0-based.

    Raises:
        EngineError: this SGLang reads such wishes elsewhere.
    """
    wishes = getattr(runner, _RECORD, None)
    _wish(wishes, "dflash_use_aux_hidden_state", True)
    _wish(wishes, "dflash_target_layer_ids", list(layers))


@hook(
    "sglang.srt.mem_cache.kv_cache_configurator.KVCacheConfigurator.configure",
    HookType.BEFORE,
    where="scheduler",
    reason="SGLang reads how much K/V a drafter has from configs of its own drafters",
    by=Moment.READY,
)
def make_room(configurator: KVCacheConfigurator, *, pre_model_load_memory: int) -> None:
    """Have the target's K/V pools, which are about to be sized, leave room for the drafter's K/V.

    Every slot has a row there, whole on every rank, whatever layers of the target have a pool of their own.

    Raises:
        EngineError: this SGLang reads such wishes elsewhere.
    """
    drafter = attached_to_ours(configurator.server_args).drafter
    if drafter is not None:
        _wish(getattr(configurator, _RECORD, None), "dflash_draft_num_layers", drafter.config.num_hidden_layers)
        size = bytes_per_token(drafter.config, configurator.model_dtype)
        _wish(configurator, "dflash_draft_cell_size_per_token", size)


def weights_region(runner: ModelRunner) -> AbstractContextManager[object]:
    """Return the context whose allocations leave the device's memory with the target's weights, and come back as are.

    The host keeps a copy: what brings the target new weights after a pause seldom brings the drafter's.
    """
    return runner.memory_saver_adapter.region(GPU_MEMORY_TYPE_WEIGHTS, enable_cpu_backup=True)


def kv_region(runner: ModelRunner) -> AbstractContextManager[object]:
    """Return the context whose allocations leave the device's memory with the K/V pools, and come back empty."""
    return runner.memory_saver_adapter.region(GPU_MEMORY_TYPE_KV_CACHE)


def graph_context(runner: ModelRunner) -> Callable[..., AbstractContextManager[object]]:
    """Return ``torch.cuda.graph``, or what captures so that the graph's memory leaves the device with SGLang's.

    What a graph has written there before a pause, its replays read after it.
    """
    saver = runner.memory_saver_adapter
    if saver.enabled and envs.SGLANG_MEMORY_SAVER_CUDA_GRAPH.get():
        return partial(saver.cuda_graph, tag=GPU_MEMORY_TYPE_CUDA_GRAPH, enable_cpu_backup=True)
    return torch.cuda.graph
