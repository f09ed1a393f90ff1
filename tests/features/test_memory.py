"""Tests of memory that is given away: nothing is decoded without it, and the drafter lies in SGLang's regions."""

from __future__ import annotations

import asyncio
from inspect import signature
from types import SimpleNamespace

import pytest
import torch
from golden_server import DRAFT, PATCHES
from sglang.srt.managers.io_struct import (
    ContinueGenerationReqInput,
    ReleaseMemoryOccupationReqInput,
    ReleaseMemoryOccupationReqOutput,
    ResumeMemoryOccupationReqInput,
)
from sglang.srt.model_executor.model_runner_components.spec_aux_hidden_state import SpecAuxHiddenStateConfig
from sglang.srt.models.qwen3 import Qwen3ForCausalLM
from sglang.srt.runtime_context import get_parallel
from sglang.srt.utils.torch_memory_saver_adapter import TorchMemorySaverAdapter
from sglang_objects import ONE_RANK, model_config, partly, runner

from sglang_dspark.config import DSparkConfig
from sglang_dspark.draft.weights import ResolvedDrafter
from sglang_dspark.engine.target import graph_context
from sglang_dspark.features import memory
from sglang_dspark.features.memory import release, resume, stay_paused
from sglang_dspark.worker.worker import DSparkWorker


class Manager:
    """SGLang's, as far as memory goes: it ends over what it does not expect."""

    def __init__(self, *, paused):
        self.offload_tags, self.idle = set(), True
        self.scheduler = SimpleNamespace(_engine_paused=paused, weight_updater=self)

    @property
    def paused(self):
        return self.scheduler._engine_paused

    def is_fully_idle(self, ignore_waiting):
        return self.idle

    def answer(self, asked):
        def original(asked):
            assert self.idle and not self.offload_tags & set(asked.tags)
            self.offload_tags |= set(asked.tags)
            return ReleaseMemoryOccupationReqOutput()

        return release(original, self, asked)

    def release(self, tags=None):
        return self.answer(ReleaseMemoryOccupationReqInput(tags=tags))

    def resume(self, tags=None):
        def original(asked):
            for tag in asked.tags:
                self.offload_tags.remove(tag)

        resume(original, self, ResumeMemoryOccupationReqInput(tags=tags))


@pytest.mark.parametrize("paused", [False, True])
def test_nothing_is_decoded_while_memory_is_away(paused):
    """Afterwards a server is paused if an operator has paused it, and has not said otherwise."""
    manager = Manager(paused=paused)
    scheduler = manager.scheduler
    manager.release(["weights"])
    manager.release()
    assert manager.offload_tags == {"weights", "kv_cache", "cuda_graph"} and manager.paused
    manager.release(["weights"])
    manager.resume(["weights", "kv_cache"])
    assert manager.paused
    manager.resume()
    assert not manager.offload_tags and manager.paused is paused
    manager.resume()
    manager.release()
    scheduler._engine_paused = False
    stay_paused(lambda asked: None, scheduler, ContinueGenerationReqInput())
    assert manager.paused
    manager.resume()
    assert not manager.paused
    stay_paused(lambda asked: None, scheduler, ContinueGenerationReqInput())
    assert not manager.paused


def test_memory_of_a_cpu_stays():
    manager = SimpleNamespace(config_value={"device": "cpu"}.__getitem__)
    for ask in (memory.ask_to_release, memory.ask_to_resume):
        with pytest.raises(ValueError, match="this server runs on cpu, and only memory of a GPU"):
            asyncio.run(ask(manager, ReleaseMemoryOccupationReqInput()))


class Replicas:
    """A front end before schedulers, of which some have requests; one may get its request after it was asked."""

    def __init__(self, *busy, late=False):
        self.late = late
        # Of the arguments themselves it is None if the operator has named none.
        self.config_value = {"device": "cuda"}.__getitem__
        self.auto_create_handle_loop = lambda: None
        self.schedulers = [Manager(paused=False) for _ in busy]
        for scheduler, has_requests in zip(self.schedulers, busy, strict=True):
            scheduler.idle = not has_requests

    async def release_memory_occupation_communicator(self, asked):
        answers = [scheduler.answer(asked) for scheduler in self.schedulers]
        self.schedulers[-1].idle &= not self.late
        return answers


@pytest.mark.parametrize(
    ("replicas", "said", "away"),
    [
        (Replicas(True), "^no memory is released", [False]),
        (Replicas(False, True), "^no memory is released", [False, False]),
        (Replicas(False, False, late=True), "^1 of 2 replicas have released memory", [True, False]),
    ],
)
def test_a_refusal_says_what_is_released_all_the_same(replicas, said, away):
    with pytest.raises(ValueError, match=f"{said}.*: requests are running; .* release again$"):
        asyncio.run(memory.ask_to_release(replicas, ReleaseMemoryOccupationReqInput()))
    assert [bool(scheduler.offload_tags) for scheduler in replicas.schedulers] == away


def test_all_replicas_release_memory():
    replicas = Replicas(False, False)
    asyncio.run(memory.ask_to_release(replicas, ReleaseMemoryOccupationReqInput(tags=["weights"])))
    assert [scheduler.offload_tags for scheduler in replicas.schedulers] == [{"weights"}] * 2


def test_running_requests_keep_the_memory():
    manager = Manager(paused=False)
    manager.idle = False
    assert manager.release().rid == memory.REFUSED
    assert not manager.offload_tags and not manager.paused


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
