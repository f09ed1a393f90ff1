"""The drafter's weights and K/V lie in SGLang's regions of memory that is given away."""

from __future__ import annotations

from inspect import signature
from types import SimpleNamespace

import torch
from golden_server import DRAFT, PATCHES
from sglang.srt.model_executor.model_runner_components.spec_aux_hidden_state import SpecAuxHiddenStateConfig
from sglang.srt.models.qwen3 import Qwen3ForCausalLM
from sglang.srt.runtime_context import get_parallel
from sglang.srt.utils.torch_memory_saver_adapter import TorchMemorySaverAdapter
from sglang_objects import ONE_RANK, model_config, partly, runner

from sglang_dspark.config import DSparkConfig
from sglang_dspark.draft.weights import ResolvedDrafter
from sglang_dspark.engine.target import graph_context
from sglang_dspark.worker.worker import DSparkWorker


class Adapter(TorchMemorySaverAdapter):
    """SGLang's, over the stand-in of the tests' servers."""

    def __init__(self, saver):
        self._saver = saver

    def region(self, tag, enable_cpu_backup=False):
        return self._saver.region(tag, enable_cpu_backup)


def test_the_drafter_lies_where_memory_is_given_away(monkeypatch):
    monkeypatch.syspath_prepend(PATCHES)
    from memory_saver import MemorySaver, storages

    saver, drafter = MemorySaver(), ResolvedDrafter.read(DRAFT)
    shape = drafter.config.vocab_size, drafter.config.hidden_size
    layers = [partly(torch.nn.Module, weight=torch.randn(shape)) for _ in range(2)]
    model = partly(Qwen3ForCausalLM, get_input_embeddings=lambda: layers[0], lm_head=layers[1])
    target = runner(
        model_config=model_config(quantization=None),
        model=model,
        dtype=torch.float32,
        kv_cache_dtype=torch.float32,
        spec_aux_config=SpecAuxHiddenStateConfig(),
        memory_saver_adapter=Adapter(saver),
    )
    settled = SimpleNamespace(drafter=drafter, dummy_draft=True, draft_window=None)
    worker = partly(
        DSparkWorker,
        settled=settled,
        options=DSparkConfig(),
        device=torch.device("cpu"),
        candidates=None,
        parts=[],
        _target_worker=SimpleNamespace(model_runner=target),
    )
    with get_parallel().override(tp_group=ONE_RANK, tp_size=1):
        worker.drafter = worker.load_drafter()
    model, shared = worker.drafter.model, storages([layer.weight for layer in layers])
    kept = saver.regions["weights", True]
    own = {name: weight for name, weight in model.named_parameters() if weight.data_ptr() not in shared}
    assert len(own) > 10
    assert [name for name, weight in own.items() if not storages([weight]).keys() <= kept.keys()] == []
    worker.alloc_memory_pool(token_to_kv_pool_allocator=SimpleNamespace(size_full=64, page_size=1))
    cache = worker.drafter.cache
    assert storages([cache.k, cache.v, cache.tokens]).keys() <= saver.regions["kv_cache", False].keys()


def test_graphs_give_their_memory_away_where_those_of_sglang_do(monkeypatch):
    captured = []
    saver = SimpleNamespace(enabled=True, cuda_graph=lambda **how: captured.append(how))
    with_saver = runner(memory_saver_adapter=saver)
    assert graph_context(with_saver) is torch.cuda.graph
    monkeypatch.setenv("SGLANG_MEMORY_SAVER_CUDA_GRAPH", "1")
    graph_context(with_saver)(cuda_graph="g", pool="p", stream="s")
    assert captured == [{"cuda_graph": "g", "pool": "p", "stream": "s", "tag": "cuda_graph", "enable_cpu_backup": True}]
    assert graph_context(runner(memory_saver_adapter=TorchMemorySaverAdapter.create(False))) is torch.cuda.graph
    assert "cuda_graph" in signature(torch.cuda.graph).parameters
