"""A scheduler decodes nothing while its memory is away."""

import asyncio
from types import SimpleNamespace

import pytest
from sglang.srt.managers.io_struct import (
    ContinueGenerationReqInput,
    ReleaseMemoryOccupationReqInput,
    ReleaseMemoryOccupationReqOutput,
    ResumeMemoryOccupationReqInput,
)

from sglang_dspark.engine.request_options import refuses
from sglang_dspark.features import memory
from sglang_dspark.features.memory import go_on, release, resume


class Manager:
    """SGLang's, as far as memory goes: it ends over what it does not expect."""

    def __init__(self, *, paused):
        self.offload_tags, self.idle = set(), True
        self.scheduler = SimpleNamespace(_engine_paused=paused, weight_updater=self)

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
    assert manager.offload_tags == {"weights", "kv_cache", "cuda_graph"} and scheduler._engine_paused
    manager.release(["weights"])
    manager.resume(["weights", "kv_cache"])
    assert scheduler._engine_paused
    manager.resume()
    assert not manager.offload_tags and scheduler._engine_paused is paused
    manager.resume()
    manager.release()
    scheduler._engine_paused = False
    go_on(lambda asked: None, scheduler, ContinueGenerationReqInput())
    assert scheduler._engine_paused
    manager.resume()
    assert not scheduler._engine_paused
    go_on(lambda asked: None, scheduler, ContinueGenerationReqInput())
    assert not scheduler._engine_paused


def test_memory_of_a_cpu_stays():
    manager = SimpleNamespace(config_value={"device": "cpu"}.__getitem__)
    for ask in (memory.ask_to_release, memory.ask_to_resume):
        with pytest.raises(ValueError, match="memory of the device cpu cannot be given away; serve on cuda"):
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
    assert refuses(manager.release())
    assert not manager.offload_tags and not manager.scheduler._engine_paused
