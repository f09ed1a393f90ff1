"""A scheduler decodes nothing while its memory is away."""

import asyncio
from types import SimpleNamespace

import pytest
from sglang.srt.managers.io_struct import ReleaseMemoryOccupationReqInput, ResumeMemoryOccupationReqInput

from sglang_dspark.features.memory import asking
from sglang_dspark.features.memory.occupation import BUSY, release, resume, stay_paused


class Manager:
    """SGLang's, as far as memory goes: it ends over what it does not expect."""

    def __init__(self, *, paused):
        self.offload_tags, self.idle = set(), True
        self.scheduler = SimpleNamespace(_engine_paused=paused, weight_updater=self)

    def is_fully_idle(self, ignore_waiting):
        return self.idle

    def release(self, tags=None):
        def original(manager, asked):
            assert self.idle and not self.offload_tags & set(asked.tags)
            self.offload_tags |= set(asked.tags)

        answer = release(original, self, ReleaseMemoryOccupationReqInput(tags=tags))
        return None if answer is None else answer.rid

    def resume(self, tags=None):
        def original(manager, asked):
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
    assert manager.offload_tags == {"weights", "kv_cache", "cuda_graph"} and scheduler._engine_paused
    manager.release(["weights"])
    manager.resume(["weights", "kv_cache"])
    assert scheduler._engine_paused
    manager.resume()
    assert not manager.offload_tags and scheduler._engine_paused is paused
    manager.resume()
    manager.release()
    scheduler._engine_paused = False
    stay_paused(None, scheduler)
    assert scheduler._engine_paused
    manager.resume()
    assert not scheduler._engine_paused
    stay_paused(None, scheduler)
    assert not scheduler._engine_paused


def test_memory_of_a_cpu_stays():
    manager = SimpleNamespace(server_args=SimpleNamespace(device="cpu"))
    for ask in (asking.release, asking.resume):
        with pytest.raises(ValueError, match="memory of cpu cannot be given away; cuda alone can"):
            asyncio.run(ask(manager, ReleaseMemoryOccupationReqInput()))


@pytest.mark.parametrize(("rids", "said"), [([BUSY], "^no memory is released"), ([None, BUSY], "^1 of 2 replicas")])
def test_a_refusal_says_what_is_released_all_the_same(monkeypatch, rids, said):
    async def answer(asked):
        return [SimpleNamespace(rid=rid) for rid in rids]

    monkeypatch.setattr(asking, "_PAUSE_S", 0)
    manager = SimpleNamespace(server_args=SimpleNamespace(device="cuda"), auto_create_handle_loop=lambda: None)
    manager.release_memory_occupation_communicator = answer
    with pytest.raises(ValueError, match=f"{said}.*: {BUSY}; .* release again$"):
        asyncio.run(asking.release(manager, ReleaseMemoryOccupationReqInput()))


def test_running_requests_keep_the_memory():
    manager = Manager(paused=False)
    manager.idle = False
    assert manager.release() == BUSY
    assert not manager.offload_tags and not manager.scheduler._engine_paused
