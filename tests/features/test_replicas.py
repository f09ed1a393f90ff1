"""A server ends with the first of its schedulers that fails, and with none that ends as it should."""

import multiprocessing
import os
import time
from itertools import chain, repeat
from multiprocessing.connection import wait
from threading import Thread

import pytest

from sglang_dspark.features import replicas


@pytest.fixture
def schedulers(monkeypatch):
    monkeypatch.setattr(replicas, "GRACE_S", 0.0)
    context = multiprocessing.get_context("spawn")
    # The first one ends at once, as it should; the others would go on.
    made = [context.Process(target=time.sleep, args=(seconds,)) for seconds in (0, 600, 600)]
    for process in made:
        process.start()
    yield made
    for process in made:
        process.kill()


def test_the_first_that_is_killed_ends_the_server(schedulers):
    ends = []
    thread = Thread(target=replicas.end_with_the_first, args=(schedulers, lambda: ends.append(1)))
    thread.start()
    assert wait([schedulers[0].sentinel], timeout=60)
    thread.join(timeout=0.3)
    assert thread.is_alive() and not ends
    schedulers[2].kill()
    thread.join(timeout=60)
    assert ends == [1]


class Collected:
    """A process that has failed, and whose status SGLang's controller is collecting, as it does on most nodes."""

    pid = 1

    def __init__(self):
        self.sentinel, end = os.pipe()
        os.close(end)  # so the process has ended
        self._statuses = chain([None, None], repeat(3))

    @property
    def exitcode(self):
        return next(self._statuses)


def test_a_status_that_another_thread_collects_is_waited_for(monkeypatch, caplog):
    monkeypatch.setattr(replicas, "GRACE_S", 0.0)
    failed, ends = Collected(), []
    replicas.end_with_the_first([failed], lambda: ends.append(1))
    os.close(failed.sentinel)
    assert ends == [1] and "has ended with status 3" in caplog.text
